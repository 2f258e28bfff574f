"""Answers of /v1/completions and /v1/chat/completions as plain dicts, and the parts that a stream shares."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from enginecore.errors import RequestError
from enginecore.frontend.openai.bodies import ChatBody, CompletionBody
from enginecore.frontend.openai.deltas import Deltas
from enginecore.frontend.openai.offsets import TextOffsets
from enginecore.frontend.parsing import NO_PARSERS, Parsers
from enginecore.frontend.text.tokenizer import NO_TOKENIZER
from enginecore.outputs import CompletionOutput, Logprob, RequestOutput

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""

Row = Mapping[int, Logprob] | None
"""The candidates at one position; None where nothing came before."""


Naming = Callable[[int, Row], str]
"""Returns what a token is called, given its row of candidates."""


class Vocabulary(Protocol):
    """The part of a tokenizer that answers use."""

    @property
    def special_ids(self) -> Collection[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def token_text(self, token: int, /) -> str: ...
    def token_bytes(self, token: int, /) -> bytes: ...


class NoVocabulary:
    """Stands in where a model has no tokenizer: answers with plain token counts need none."""

    special_ids: frozenset[int] = frozenset()

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        raise RequestError(NO_TOKENIZER)

    def token_text(self, token: int) -> str:
        raise RequestError(NO_TOKENIZER)

    def token_bytes(self, token: int) -> bytes:
        raise RequestError(NO_TOKENIZER)


class Head(NamedTuple):
    """The fields that every answer and every chunk of a request begins with."""

    id: str
    created: int
    """Seconds since the epoch."""
    model: str
    """As the request named it."""


def completion_answer(
    head: Head, body: CompletionBody, outputs: Sequence[RequestOutput], vocabulary: Vocabulary
) -> dict[str, Any]:
    """Return the whole answer to `body`: the finished output of each prompt, in order."""
    if body.prompt_alone:
        outputs = [without_new_tokens(output) for output in outputs]
    choices = [
        _completion_choice(body, output, sample, index * body.samples + sample.index, vocabulary)
        for index, output in enumerate(outputs)
        for sample in output.outputs
    ]
    return {**_heading(head, "text_completion"), "choices": choices, "usage": count_usage(outputs)}


def chat_answer(
    head: Head, body: ChatBody, output: RequestOutput, vocabulary: Vocabulary, parsers: Parsers = NO_PARSERS
) -> dict[str, Any]:
    """Return the whole answer to `body`; `parsers` (see `parsers_of`) look for reasoning and calls in it."""
    choices = [_chat_choice(body, output, sample, vocabulary, parsers) for sample in output.outputs]
    answer = {**_heading(head, "chat.completion"), "choices": choices, "usage": count_usage([output])}
    if body.return_token_ids:
        answer["prompt_token_ids"] = output.prompt_token_ids
    if output.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
    return answer


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Return a usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def count_usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return the usage of finished requests; each prompt counts once, however many samples it has."""
    return usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(sample.token_ids) for output in outputs for sample in output.outputs),
        sum(output.num_cached_tokens or 0 for output in outputs),
    )


def without_new_tokens(output: RequestOutput) -> RequestOutput:
    """Return `output` with its samples emptied: a request for the prompt alone ran one token to get there."""
    emptied = [replace(sample, text="", token_ids=[], logprobs=None) for sample in output.outputs]
    return replace(output, outputs=emptied)


def echoed_text(output: RequestOutput, vocabulary: Vocabulary) -> str:
    """Return the prompt's text, decoding it when the prompt was token ids."""
    return vocabulary.decode(output.prompt_token_ids) if output.prompt is None else output.prompt


def completion_logprobs(
    token_ids: Sequence[int],
    rows: Sequence[Row],
    vocabulary: Vocabulary,
    offsets: TextOffsets,
    text_length: int | None = None,
    *,
    as_ids: bool = False,
) -> dict[str, Any]:
    """Return logprobs in the completions shape: parallel lists, one entry a token.

    `offsets` goes on where the choice's earlier tokens ended. Tokens that a stop string has cut off stand at
    the end of the text, `text_length`. With `as_ids` tokens are called `token_id:` and their id.
    """
    name = _naming(vocabulary, as_ids=as_ids)
    texts = [name(token, row) for token, row in zip(token_ids, rows, strict=True)]
    places = [offsets.place(token) for token in token_ids]
    return {
        "tokens": texts,
        "text_offset": places if text_length is None else [min(place, text_length) for place in places],
        "token_logprobs": [
            None if row is None else _finite(row[token].logprob)
            for token, row in zip(token_ids, rows, strict=True)
        ],
        "top_logprobs": [
            None if row is None else _by_text(token, row, name)
            for token, row in zip(token_ids, rows, strict=True)
        ],
    }


def _by_text(token: int, row: Mapping[int, Logprob], name: Naming) -> dict[str, float]:
    """Return candidates' log probabilities by text.

    Of those that share one, such as halves of characters, the actual token stands, or else the likeliest.
    """
    found: dict[str, float] = {}
    for candidate in (token, *row):
        found.setdefault(name(candidate, row), _finite(row[candidate].logprob))
    return found


def chat_logprobs(
    token_ids: Sequence[int],
    rows: Sequence[Mapping[int, Logprob]],
    top: int,
    vocabulary: Vocabulary,
    *,
    as_ids: bool = False,
) -> dict[str, Any]:
    """Return logprobs in the chat shape: an entry a token, each with its `top` most likely candidates.

    A `top` of -1 shows all. With `as_ids` tokens are called `token_id:` and their id.
    """
    name = _naming(vocabulary, as_ids=as_ids)
    return {
        "content": [
            {
                **_candidate(token, row, vocabulary, name),
                "top_logprobs": [_candidate(i, row, vocabulary, name) for i in _most_likely(row, top)],
            }
            for token, row in zip(token_ids, rows, strict=True)
        ]
    }


def top_of(body: ChatBody) -> int:
    """Return how many candidates `body` wants of each token, -1 for all that there are."""
    return -1 if body.logprob_token_ids else body.top_logprobs or 0


def prompt_logprobs(rows: Sequence[Row]) -> list[dict[str, Any] | None]:
    """Return a prompt's logprobs: candidates by token id at each position, null at the first."""
    return [
        None
        if row is None
        else {
            str(token): {
                "logprob": _finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token, entry in row.items()
        }
        for row in rows
    ]


def error_answer(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return an error of an HTTP status, with OpenAI's `type` for it.

    `param` names the field at fault when one is, and `code` the kind of fault where clients look for one.
    """
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _heading(head: Head, kind: str) -> dict[str, Any]:
    return {"id": head.id, "object": kind, "created": head.created, "model": head.model}


def _completion_choice(
    body: CompletionBody,
    output: RequestOutput,
    sample: CompletionOutput,
    index: int,
    vocabulary: Vocabulary,
) -> dict[str, Any]:
    text = sample.text
    if body.echo:
        text = echoed_text(output, vocabulary) + text
    choice = {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }
    if body.return_token_ids:
        choice |= {"prompt_token_ids": output.prompt_token_ids, "token_ids": sample.token_ids}
    if body.wants_logprobs:
        skips, as_ids = body.skip_special_tokens is not False, bool(body.return_tokens_as_token_ids)
        offsets = TextOffsets(vocabulary, skips, len(text) - len(sample.text))
        shape = completion_logprobs(
            sample.token_ids, sample.logprobs or [], vocabulary, offsets, len(text), as_ids=as_ids
        )
        if body.echo:
            ids, rows, end = (
                output.prompt_token_ids,
                output.prompt_logprobs or [],
                len(text) - len(sample.text),
            )
            before = completion_logprobs(
                ids, rows, vocabulary, TextOffsets(vocabulary, skips), end, as_ids=as_ids
            )
            shape = {name: before[name] + entries for name, entries in shape.items()}
        choice["logprobs"] = shape
    if body.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [])
    return choice


def _chat_choice(
    body: ChatBody,
    output: RequestOutput,
    sample: CompletionOutput,
    vocabulary: Vocabulary,
    parsers: Parsers,
) -> dict[str, Any]:
    deltas = Deltas(body, parsers, output.prompt or "")
    logprobs = None
    if body.logprobs and sample.logprobs is not None:
        as_ids = bool(body.return_tokens_as_token_ids)
        top = top_of(body)
        logprobs = chat_logprobs(sample.token_ids, sample.logprobs, top, vocabulary, as_ids=as_ids)
    return {
        "index": sample.index,
        "message": deltas.message(sample.text),
        "logprobs": logprobs,
        "finish_reason": deltas.finish_reason(sample.finish_reason),
        "stop_reason": sample.stop_reason,
        **({"token_ids": sample.token_ids} if body.return_token_ids else {}),
    }


def _candidate(
    token: int, row: Mapping[int, Logprob], vocabulary: Vocabulary, name: Naming
) -> dict[str, Any]:
    return {
        "token": name(token, row),
        "logprob": _finite(row[token].logprob),
        "bytes": list(vocabulary.token_bytes(token)),
    }


def _most_likely(row: Mapping[int, Logprob], top: int) -> list[int]:
    # The chosen token is always in the row, so there may be one candidate too many.
    ordered = sorted(row, key=lambda token: -row[token].logprob)
    return ordered if top == -1 else ordered[:top]


def _naming(vocabulary: Vocabulary, *, as_ids: bool) -> Naming:
    """Return what makes a token's name: its text, or its id."""

    def text_of(token: int, row: Row) -> str:
        text = row[token].decoded_token if row is not None else None
        return vocabulary.token_text(token) if text is None else text

    return (lambda token, _: f"token_id:{token}") if as_ids else text_of


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
