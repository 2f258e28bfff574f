"""Turn a request's outputs into the chunks of its stream: server-sent events, or frames of a WebSocket.

This runs for every token, so chunks are joined from bytes that were made once for the request.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from enginecore import CompletionOutput, Prompt, RequestOutput
from enginecore.frontend.openai import (
    Body,
    ChatBody,
    CompletionBody,
    Delta,
    Deltas,
    Head,
    Parsers,
    PlacedTokens,
    Row,
    TextOffsets,
    Vocabulary,
    chat_logprobs,
    completion_logprobs,
    echoed_text,
    top_of,
    usage,
    without_new_tokens,
)
from octavo_serve.errors import ApiError

DONE = b"data: [DONE]\n\n"


class Framing(NamedTuple):
    """Framing of a chunk: bytes before and after the members of its JSON object."""

    before: bytes
    after: bytes
    closing: bytes
    """What follows the last chunk."""


EVENT = Framing(b"data: {", b"}\n\n", DONE)
"""A server-sent event."""
FRAME = Framing(b'{"type":"chunk",', b"}", b"")
"""A text frame of a WebSocket."""

_LINE_BREAKS = {b"\xe2\x80\xa8": b"\\u2028", b"\xe2\x80\xa9": b"\\u2029", b"\xc2\x85": b"\\u0085"}
_CHOICES = b',"choices":['
_RUNNING = b',"finish_reason":null}'
_encode = msgspec.json.Encoder().encode


class _Choice:
    """Streaming state of one choice: whether it has finished, and how much of its text is sent."""

    __slots__ = ("deltas", "finished", "length", "offsets", "placed", "start")

    def __init__(self, start: bytes) -> None:
        self.start = start
        """Of its chunks, up to its first member but the index."""
        self.finished = False
        self.length = 0
        """Characters sent."""
        self.offsets: TextOffsets | None = None
        """Of its tokens that have logprobs."""
        self.placed: PlacedTokens | None = None
        """Holds such tokens back, where a stop string may cut them off."""
        self.deltas: Deltas | None = None
        """Where its text is parsed."""


class Chunks(ABC):
    """Encodes the outputs of one answer, which come with DELTA, as chunks of its stream."""

    kind: str
    """The chunks' `object`."""

    def __init__(self, head: Head, body: Body, prompts: Sequence[Prompt], framing: Framing) -> None:
        start = _encode({"id": head.id, "object": self.kind, "created": head.created, "model": head.model})
        self._start = framing.before + start[1:-1] + _CHOICES
        self._end = framing.after
        self.closing = framing.closing
        """What follows the last chunk."""
        self._continuous = body.continuous_usage
        self._include_usage = body.include_usage
        self._tail = (b'],"usage":null' if body.include_usage else b"]") + self._end
        self._prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._completion_tokens = 0
        self._cached_tokens = [0] * len(prompts)
        self._samples = body.samples
        self._shows_ids = bool(body.return_token_ids)
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._num_choices = len(prompts) * body.samples
        self._choices: dict[int, _Choice] = {}

    def encode(self, prompt: int, output: RequestOutput) -> list[bytes]:
        """Return the chunks of an output of prompt number `prompt`; none when there is nothing to tell."""
        if output.num_cached_tokens:
            self._cached_tokens[prompt] = output.num_cached_tokens
        events: list[bytes] = []
        for sample in output.outputs:
            index = prompt * self._samples + sample.index
            choice = self._choices.get(index)
            if choice is None:
                choice = self._new_choice(index)
                events += self._opening(prompt, choice, output)
            if not choice.finished:
                self._completion_tokens += len(sample.token_ids)
                self._append(events, choice, sample)
        return events

    def end(self) -> list[bytes]:
        """Return the chunks that follow the last output: one with the usage, if the body asks for it."""
        return [self._start + self._usage_tail()] if self._include_usage else []

    def error(self, error: ApiError) -> bytes:
        """Return an error as the event that ends a stream which has begun."""
        return b"data: " + line_safe(error.body()) + b"\n\n" + DONE

    def usage(self) -> dict[str, Any]:
        """Return the usage of what has been encoded."""
        return usage(self._prompt_tokens, self._completion_tokens, sum(self._cached_tokens))

    def abort(self) -> list[bytes]:
        """Return the last chunks of the choices that have none yet, ended with "abort"."""
        events: list[bytes] = []
        for index in range(self._num_choices):
            choice = self._choices.get(index) or self._new_choice(index)
            if not choice.finished:
                self._abort(events, choice)
        return events

    def _new_choice(self, index: int) -> _Choice:
        choice = self._choices[index] = _Choice(self._start + b'{"index":%d,' % index)
        return choice

    def _append(self, events: list[bytes], choice: _Choice, sample: CompletionOutput) -> None:
        if choice.placed is not None:
            sample = choice.placed.certain(sample, choice.length + len(sample.text))
        logprobs = self._logprobs(choice, sample)
        if sample.finish_reason is not None:
            choice.finished = True
            ending = _ending(sample.finish_reason, sample.stop_reason)
        elif sample.text or logprobs != b"null" or (self._shows_ids and sample.token_ids):
            ending = _RUNNING
        else:
            return
        content = self._content(sample.text)
        if self._shows_ids:
            content += b',"token_ids":' + _encode(sample.token_ids)
        events.append(self._event(choice, content, logprobs, ending))

    def _abort(self, events: list[bytes], choice: _Choice) -> None:
        events.append(self._event(choice, self._content(""), b"null", _ending("abort", None)))

    def _event(
        self, choice: _Choice, content: bytes, logprobs: bytes, ending: bytes, start: bytes | None = None
    ) -> bytes:
        """Return a chunk with one choice; `start` in place of the beginning that its others have."""
        tail = self._usage_tail() if self._continuous else self._tail
        start = choice.start if start is None else start
        return b"".join((start, content, b',"logprobs":', logprobs, ending, tail))

    def _usage_tail(self) -> bytes:
        return b'],"usage":' + _encode(self.usage()) + self._end

    @abstractmethod
    def _opening(self, prompt: int, choice: _Choice, output: RequestOutput) -> list[bytes]:
        """Return the events that come before the first token of a choice for prompt number `prompt`."""

    @abstractmethod
    def _content(self, text: str) -> bytes:
        """Return the member of a choice that holds `text`."""

    @abstractmethod
    def _logprobs(self, choice: _Choice, sample: CompletionOutput) -> bytes:
        """Return the sample's new logprobs, `null` when none were asked for."""


class CompletionChunks(Chunks):
    """Chunks of /v1/completions."""

    kind = "text_completion"

    def __init__(
        self,
        head: Head,
        body: CompletionBody,
        prompts: Sequence[Prompt],
        vocabulary: Vocabulary,
        framing: Framing,
    ) -> None:
        super().__init__(head, body, prompts, framing)
        self._body = body
        self._prompt_alone = body.prompt_alone
        self._wants_logprobs = body.wants_logprobs
        self._vocabulary = vocabulary
        self._echoed: dict[int, Sequence[Row]] = {}
        """Logprobs of a prompt, by its number."""

    def encode(self, prompt: int, output: RequestOutput) -> list[bytes]:
        return super().encode(prompt, without_new_tokens(output) if self._prompt_alone else output)

    def _abort(self, events: list[bytes], choice: _Choice) -> None:
        if choice.placed is None:
            super()._abort(events, choice)
        else:  # the text that is held back is lost with the engine, but its tokens were counted
            self._append(events, choice, CompletionOutput(0, finish_reason="abort"))

    def _opening(self, prompt: int, choice: _Choice, output: RequestOutput) -> list[bytes]:
        text = echoed_text(output, self._vocabulary) if self._body.echo else ""
        choice.length = len(text)
        if self._wants_logprobs:
            choice.offsets = self._offsets(len(text))
            choice.placed = PlacedTokens(self._offsets(len(text))) if self._body.stop else None
        if not self._body.echo:
            return [self._prompt_event(choice, output, "", b"null")] if self._shows_ids else []
        logprobs = b"null"
        if self._wants_logprobs:
            # Only the first output of a prompt has its logprobs; every choice of it shows them.
            rows = self._echoed.setdefault(prompt, output.prompt_logprobs or [])
            shape = completion_logprobs(
                output.prompt_token_ids,
                rows,
                self._vocabulary,
                self._offsets(),
                len(text),
                as_ids=self._as_ids,
            )
            logprobs = _encode(shape)
        return [self._prompt_event(choice, output, text, logprobs)]

    def _prompt_event(self, choice: _Choice, output: RequestOutput, text: str, logprobs: bytes) -> bytes:
        """Return the chunk that shows of a choice's prompt what was asked for."""
        content = self._content(text)
        if self._shows_ids:
            content += b',"prompt_token_ids":' + _encode(output.prompt_token_ids)
        return self._event(choice, content, logprobs, _RUNNING)

    def _offsets(self, start: int = 0) -> TextOffsets:
        return TextOffsets(self._vocabulary, self._body.skip_special_tokens is not False, start)

    def _content(self, text: str) -> bytes:
        return b'"text":' + _encode(text)

    def _logprobs(self, choice: _Choice, sample: CompletionOutput) -> bytes:
        choice.length += len(sample.text)
        if choice.offsets is None or not sample.logprobs:
            return b"null"
        end = None if sample.finish_reason is None else choice.length
        return _encode(
            completion_logprobs(
                sample.token_ids,
                sample.logprobs,
                self._vocabulary,
                choice.offsets,
                end,
                as_ids=self._as_ids,
            )
        )


class ChatChunks(Chunks):
    """Chunks of /v1/chat/completions."""

    kind = "chat.completion.chunk"

    def __init__(
        self,
        head: Head,
        body: ChatBody,
        prompt: Prompt,
        vocabulary: Vocabulary,
        parsers: Parsers,
        framing: Framing,
    ) -> None:
        """`parsers` look for reasoning and calls, where there are any."""
        super().__init__(head, body, [prompt], framing)
        self._body = body
        self._prompt = prompt.text or ""
        self._vocabulary = vocabulary
        self._parsers = parsers

    def _opening(self, prompt: int, choice: _Choice, output: RequestOutput) -> list[bytes]:
        if any(self._parsers):
            choice.deltas = Deltas(self._body, self._parsers, self._prompt)
        start = None
        if self._shows_ids:
            ids = b',"prompt_token_ids":' + _encode(output.prompt_token_ids)
            head = self._start.removesuffix(_CHOICES)
            start = head + ids + choice.start.removeprefix(head)
        return [
            self._event(choice, b'"delta":{"role":"assistant","content":""}', b"null", _RUNNING, start=start)
        ]

    def _append(self, events: list[bytes], choice: _Choice, sample: CompletionOutput) -> None:
        if choice.deltas is None:
            super()._append(events, choice, sample)
            return
        logprobs = self._logprobs(choice, sample)
        deltas = choice.deltas.push(sample.text)
        reason = sample.finish_reason
        if reason is not None:
            choice.finished = True
            deltas += choice.deltas.finish()
            reason = choice.deltas.finish_reason(reason)
        elif not deltas and (logprobs != b"null" or (self._shows_ids and sample.token_ids)):
            deltas = [{}]
        # With the first piece, as one token may make several, or none.
        ids = b',"token_ids":' + _encode(sample.token_ids) if self._shows_ids else b""
        for delta in deltas:
            events.append(self._event(choice, _member(delta) + ids, logprobs, _RUNNING))
            logprobs, ids = b"null", b',"token_ids":[]' if ids else b""
        if reason is not None:
            content = _member({}) + ids
            events.append(self._event(choice, content, logprobs, _ending(reason, sample.stop_reason)))

    def _abort(self, events: list[bytes], choice: _Choice) -> None:
        held = [] if choice.deltas is None else choice.deltas.finish()
        events += [self._event(choice, _member(delta), b"null", _RUNNING) for delta in held]
        super()._abort(events, choice)

    def _content(self, text: str) -> bytes:
        return b'"delta":{"content":' + _encode(text) + b"}" if text else b'"delta":{}'

    def _logprobs(self, choice: _Choice, sample: CompletionOutput) -> bytes:
        if not self._body.logprobs or not sample.logprobs:
            return b"null"
        return _encode(
            chat_logprobs(
                sample.token_ids,
                sample.logprobs,
                top_of(self._body),
                self._vocabulary,
                as_ids=self._as_ids,
            )
        )


def line_safe(event: bytes) -> bytes:
    """Return JSON in UTF-8 without U+2028, U+2029 and U+0085 as they are: readers by lines break on them."""
    if b"\xe2\x80" in event or b"\xc2\x85" in event:
        for character, escaped in _LINE_BREAKS.items():
            event = event.replace(character, escaped)
    return event


def _member(delta: Delta) -> bytes:
    return b'"delta":' + _encode(delta)


def _ending(finish_reason: str, stop_reason: Any) -> bytes:
    return b',"finish_reason":%b,"stop_reason":%b}' % (_encode(finish_reason), _encode(stop_reason))
