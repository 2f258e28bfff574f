"""Files in OpenAI's batch format: a request a line in, an answer a line out."""

import codecs
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple
from uuid import uuid4

import msgspec

from enginecore.errors import RequestError
from enginecore.frontend import openai
from enginecore.frontend.openai import ChatBody, CompletionBody
from octavo_offline.progress import show_progress
from octavo_offline.running import Job, Result, run_jobs

if TYPE_CHECKING:
    from enginecore import LLMEngine

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


class Counts(NamedTuple):
    """Number of a batch's requests by outcome."""

    answered: int
    failed: int


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class _Key(NamedTuple):
    """The parts of a request that its answer needs."""

    custom_id: str
    head: openai.Head
    body: ChatBody | CompletionBody


def run_batch(
    engine: "LLMEngine",
    names: Sequence[str],
    source: Iterable[bytes],
    out: BinaryIO,
    total: int | None = None,
) -> Counts:
    """Run the request on each line of `source` and write an answer line for each to `out` as it finishes.

    A line that cannot be run gets an answer line with its error, and the others run. `names` are those by
    which a request may call the model; `total`, the number of lines, is for the progress bar.
    """
    writer = _Writer(engine, out)
    with show_progress(total) as progress:
        for result in run_jobs(engine, _jobs(engine, names, source, writer), progress):
            if result.error is None:
                writer.answer(result)
            else:
                writer.fail(result.job.key.custom_id, result.error)
    return Counts(writer.answered, writer.failed)


class _Writer:
    def __init__(self, engine: "LLMEngine", out: BinaryIO) -> None:
        self.answered = 0
        self.failed = 0
        self._out = out
        tokenizer = engine.frontend.tokenizer
        self._vocabulary = openai.NoVocabulary() if tokenizer is None else tokenizer

    def answer(self, result: Result) -> None:
        """Write the answer to a job that ran."""
        custom_id, head, body = result.job.key
        if isinstance(body, ChatBody):
            content = openai.chat_answer(head, body, result.outputs[0], self._vocabulary)
        else:
            content = openai.completion_answer(head, body, result.outputs, self._vocabulary)
        self.answered += 1
        self._write(custom_id, 200, head.id, content)

    def fail(self, custom_id: Any, error: RequestError) -> None:
        """Write why a request was not run."""
        status = 404 if isinstance(error, openai.ModelNotFound) else 400
        content = openai.error_answer(status, str(error), error.param, error.code)
        self.failed += 1
        self._write(custom_id, status, f"req-{uuid4().hex}", content)

    def _write(self, custom_id: Any, status: int, request_id: str, body: dict[str, Any]) -> None:
        error = body.get("error")
        line = {
            "id": f"batch_req_{uuid4().hex}",
            "custom_id": custom_id,
            "response": {"status_code": status, "request_id": request_id, "body": body},
            "error": None if error is None else {"code": error["type"], "message": error["message"]},
        }
        self._out.write(msgspec.json.encode(line) + b"\n")
        self._out.flush()


def _jobs(
    engine: "LLMEngine", names: Sequence[str], source: Iterable[bytes], writer: _Writer
) -> Iterator[Job]:
    for number, line in enumerate(source):
        if number == 0:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        custom_id = None
        try:
            fields = openai.decode(line)
            custom_id = fields.get("custom_id")
            yield _read(engine, names, openai.convert(fields, _Line))
        except RequestError as error:
            writer.fail(custom_id, error)


def _read(engine: "LLMEngine", names: Sequence[str], line: _Line) -> Job:
    if line.method != "POST":
        raise RequestError(f"method must be POST, got {line.method!r:.80}", "method")
    if line.url not in (COMPLETIONS, CHAT):
        raise RequestError(f"url must be {COMPLETIONS} or {CHAT}, got {line.url!r:.80}", "url")
    model = openai.model_name(line.body, names)
    most = engine.config.max_logprobs
    if line.url == CHAT:
        return _chat_job(engine, line.custom_id, model, openai.read_chat(line.body, most))
    return _completion_job(engine, line.custom_id, model, openai.read_completion(line.body, most))


def _chat_job(engine: "LLMEngine", custom_id: str, model: str, body: ChatBody) -> Job:
    _refuse_streaming(body)
    prompt = engine.frontend.prepare_chat(
        body.messages, cache_salt=body.cache_salt, **openai.template_options(body)
    )
    key = _Key(custom_id, _head("chatcmpl", model), body)
    params = openai.chat_params(body, engine.frontend.sampling_defaults)
    return Job(key, [prompt], [params], body.priority or 0)


def _completion_job(engine: "LLMEngine", custom_id: str, model: str, body: CompletionBody) -> Job:
    _refuse_streaming(body)
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
    key = _Key(custom_id, _head("cmpl", model), body)
    return Job(key, prompts, each, body.priority or 0)


def _refuse_streaming(body: ChatBody | CompletionBody) -> None:
    if body.stream:
        raise RequestError("a request of a batch cannot stream: leave stream out", "stream")


def _head(prefix: str, model: str) -> openai.Head:
    return openai.Head(f"{prefix}-{uuid4().hex}", int(time.time()), model)
