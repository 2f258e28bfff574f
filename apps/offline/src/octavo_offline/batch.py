"""Files in OpenAI's batch format: a request a line in, an answer a line out."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from uuid import uuid4

import msgspec

from enginecore.errors import RequestError
from enginecore.frontend import openai
from enginecore.frontend.openai import ChatBody, CompletionBody
from octavo_offline.batch_input import Numbered
from octavo_offline.progress import show_progress
from octavo_offline.running import Job, Result, run_jobs

if TYPE_CHECKING:
    from enginecore import Engine

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


FAILURES_KEPT = 10
"""Failures of which a batch keeps the message."""


class Output(Protocol):
    """The part of an answer file that a batch uses."""

    def write(self, line: bytes) -> object: ...


@dataclass(slots=True)
class Counts:
    """Number of a batch's requests by outcome, so far."""

    answered: int = 0
    failed: int = 0
    failed_before: int = 0
    """Errors among the answers of an earlier run."""
    failures: list[str] = field(default_factory=list)
    """The first failures, a line of text each."""

    @property
    def written(self) -> int:
        """Answer lines of this run."""
        return self.answered + self.failed


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class _Key(NamedTuple):
    """The parts of a request that its answer needs."""

    number: int
    """Of its line in the input."""
    custom_id: str
    head: openai.Head
    body: ChatBody | CompletionBody
    parsers: openai.Parsers = openai.NO_PARSERS
    """Of a chat's reasoning and tool calls."""


class _NoRequest(RequestError):
    """A line that is no request to one of the routes."""


def run_batch(
    engine: "Engine",
    names: Sequence[str],
    source: Iterable[Numbered],
    out: Output,
    counts: Counts,
    total: int | None = None,
) -> None:
    """Run the request on each line of `source` and write an answer line for each to `out` as it finishes.

    A line that cannot be run gets an answer line with its error, and the others run. `names` are those by
    which a request may call the model; `counts` is kept while they run; `total`, the number of lines, is
    for the progress bar.
    """
    writer = _Writer(engine, out, counts)
    with show_progress(total) as progress:
        for result in run_jobs(engine, _jobs(engine, names, source, writer), progress):
            if result.error is None:
                writer.answer(result)
            else:
                key = result.job.key
                writer.fail(key.number, key.custom_id, openai.blame(key.body, result.error))


class _Writer:
    def __init__(self, engine: "Engine", out: Output, counts: Counts) -> None:
        self._out = out
        self._counts = counts
        tokenizer = engine.frontend.tokenizer
        self._vocabulary = openai.NoVocabulary() if tokenizer is None else tokenizer

    def answer(self, result: Result) -> None:
        """Write the answer to a job that ran."""
        _, custom_id, head, body, parsers = result.job.key
        if isinstance(body, ChatBody):
            content = openai.chat_answer(head, body, result.outputs[0], self._vocabulary, parsers)
        else:
            content = openai.completion_answer(head, body, result.outputs, self._vocabulary)
        self._write(custom_id, {"response": _response(200, head.id, content), "error": None})
        self._counts.answered += 1

    def fail(self, number: int, custom_id: Any, error: RequestError) -> None:
        """Write why the request on line `number` was not run.

        A request that the server would refuse has the server's response; a line that is no request has none.
        """
        if isinstance(error, _NoRequest):
            reason = {"code": "invalid_request", "message": str(error), "param": error.param, "line": number}
            self._write(custom_id, {"response": None, "error": reason})
        else:
            status = 404 if isinstance(error, openai.ModelNotFound) else 400
            content = openai.error_answer(status, str(error), error.param, error.code)
            self._write(
                custom_id, {"response": _response(status, f"req-{uuid4().hex}", content), "error": None}
            )
        self._counts.failed += 1
        if len(self._counts.failures) < FAILURES_KEPT:
            self._counts.failures.append(f"line {number}: {' '.join(str(error).split())}")

    def _write(self, custom_id: Any, outcome: dict[str, Any]) -> None:
        line = {"id": f"batch_req_{uuid4().hex}", "custom_id": custom_id, **outcome}
        self._out.write(msgspec.json.encode(line) + b"\n")


def _response(status: int, request_id: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": request_id, "body": body}


def _jobs(
    engine: "Engine", names: Sequence[str], source: Iterable[Numbered], writer: _Writer
) -> Iterator[Job]:
    for number, text in source:
        custom_id = None
        try:
            fields = _decode(text)
            custom_id = fields.get("custom_id")
            yield _read(engine, names, number, _line(fields))
        except RequestError as error:
            writer.fail(number, custom_id, error)


def _decode(text: bytes) -> dict[str, Any]:
    try:
        return openai.decode(text)
    except RequestError as error:
        raise _NoRequest(str(error).replace("the body", "the line"), error.param) from error


def _line(fields: dict[str, Any]) -> _Line:
    try:
        line = openai.convert(fields, _Line)
    except RequestError as error:
        raise _NoRequest(str(error), error.param) from error
    if line.method != "POST":
        raise _NoRequest(f"method must be POST, got {line.method!r:.80}", "method")
    if line.url not in (COMPLETIONS, CHAT):
        raise _NoRequest(f"url must be {COMPLETIONS} or {CHAT}, got {line.url!r:.80}", "url")
    return line


def _read(engine: "Engine", names: Sequence[str], number: int, line: _Line) -> Job:
    model = openai.model_name(line.body, names)
    most = engine.config.max_logprobs
    if line.url == CHAT:
        return _chat_job(engine, number, line.custom_id, model, openai.read_chat(line.body, most))
    return _completion_job(engine, number, line.custom_id, model, openai.read_completion(line.body, most))


def _chat_job(engine: "Engine", number: int, custom_id: str, model: str, body: ChatBody) -> Job:
    _refuse_what_batches_lack(body)
    parsers = openai.parsers_of(body, engine.frontend.parsers)
    with openai.blaming(body):
        prompt = engine.frontend.prepare_chat(
            body.messages, cache_salt=body.cache_salt, **openai.template_options(body)
        )
    key = _Key(number, custom_id, _head("chatcmpl", model), body, parsers)
    params = openai.chat_params(body, engine.frontend.sampling_defaults)
    thinking = openai.thinking_of(body, parsers, prompt.text or "")
    return Job(key, [prompt], [params], body.priority or 0, parsers.special_tokens, thinking)


def _completion_job(engine: "Engine", number: int, custom_id: str, model: str, body: CompletionBody) -> Job:
    _refuse_what_batches_lack(body)
    params = openai.completion_params(body, engine.frontend.sampling_defaults)
    texts = openai.completion_prompts(body.prompt)
    openai.check_choices(len(texts), body.samples)
    special = body.add_special_tokens is not False
    prompts = [
        engine.frontend.prepare_prompt(text, add_special_tokens=special, cache_salt=body.cache_salt)
        for text in texts
    ]
    limit = engine.limits.max_model_len
    each = [openai.fit_default(body, params, len(prompt.token_ids), limit) for prompt in prompts]
    key = _Key(number, custom_id, _head("cmpl", model), body)
    return Job(key, prompts, each, body.priority or 0)


def _refuse_what_batches_lack(body: ChatBody | CompletionBody) -> None:
    if body.stream:
        raise RequestError("a request of a batch cannot stream: leave stream out", "stream")
    if body.use_beam_search:
        raise RequestError("a request of a batch cannot use_beam_search: leave it out", "use_beam_search")


def _head(prefix: str, model: str) -> openai.Head:
    return openai.Head(f"{prefix}-{uuid4().hex}", int(time.time()), model)
