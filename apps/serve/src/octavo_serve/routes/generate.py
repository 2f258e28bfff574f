"""POST /v1/completions and /v1/chat/completions."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from enginecore import Prompt, Request, RequestOutput, SamplingParams
from enginecore.errors import RequestAbortedError, RequestError
from enginecore.frontend import openai
from octavo_serve.access import RequestRecord, record_of
from octavo_serve.auth import key_name
from octavo_serve.chunks import ChatChunks, CompletionChunks
from octavo_serve.errors import ApiError, as_api_error
from octavo_serve.responses import EventStream, JsonAnswer
from octavo_serve.routes.beams import search_beams
from octavo_serve.routes.requests import answer_id, off_loop, raise_failure, read_body, server_of
from octavo_serve.state import ServerState

_EACH_WORD = 256
"""Characters of a long text that take as long to tokenise as a word that is by itself."""


class _Prepared(NamedTuple):
    """What takes time to make of sampling parameters, by its names in `Request`."""

    bad_word_ids: list[list[int]] | None
    grammar: str | None


class Events(Protocol):
    """Encodes the outputs of a request as events of its stream."""

    def encode(self, prompt: int, output: RequestOutput) -> bytes:
        """Return the events for an output of prompt number `prompt`; empty when there is nothing to tell."""
        ...

    def end(self) -> bytes:
        """Return what follows the last output."""
        ...

    def abort(self) -> bytes:
        """Return the last events of what has not finished; `end` follows."""
        ...

    def error(self, error: ApiError) -> bytes:
        """Return the events that end a stream which has begun."""
        ...


class Job(NamedTuple):
    """A body, ready to be run and answered."""

    server: ServerState
    head: openai.Head
    body: openai.Body
    prompts: Sequence[Prompt]
    events: Callable[[], Events]
    """Makes the encoder of a streamed answer."""
    answer: Callable[[Sequence[RequestOutput]], dict[str, Any]]
    """Makes the whole answer of the prompts' final outputs."""
    record: RequestRecord
    key: str | None
    """Name of the client's key."""
    shown_tokens: Sequence[str] = ()
    """Special tokens that the text shows."""
    fields: Mapping[str, str] = {}
    """Names that fields of `body` have in the API that it was asked by, where they have others."""

    async def response(self, params: SamplingParams | None) -> Response:
        """Return the response, streamed if the body asks for that; without `params`, of a beam search."""
        if params is None:
            return JsonAnswer(_beam_answer(self))
        requests = self._requests(params, await _prepared(self.server, self.body, params))
        if self.body.stream:
            return EventStream(lambda response: _events(self, requests, response))
        return JsonAnswer(_whole_answer(self, requests))

    def _requests(self, params: SamplingParams, prepared: _Prepared) -> list[Request]:
        server, body = self.server, self.body
        # Numbered, since two clients may choose the same id.
        return [
            Request(
                f"{self.head.id}-{next(server.numbers)}",
                prompt,
                openai.fit_default(body, params, len(prompt.token_ids), server.max_model_len),
                body.priority or 0,
                shown_tokens=self.shown_tokens,
                **prepared._asdict(),
            )
            for prompt in self.prompts
        ]


async def create_completion(http: HttpRequest) -> Response:
    """Continue one or several prompts."""
    server = server_of(http)
    frontend = server.frontend
    fields = openai.decode(await read_body(http))
    name = openai.model_name(fields, server.names)
    body = openai.read_completion(fields, server.engine.config.max_logprobs)
    params = None if body.use_beam_search else openai.completion_params(body, frontend.sampling_defaults)
    texts = openai.completion_prompts(body.prompt)
    openai.check_choices(len(texts), body.samples)
    special = body.add_special_tokens is not False
    prompts = await off_loop(
        sum(map(len, texts)),
        lambda: [
            frontend.prepare_prompt(text, add_special_tokens=special, cache_salt=body.cache_salt)
            for text in texts
        ],
    )
    head = openai.Head(answer_id(http, "cmpl"), int(time.time()), name)
    vocabulary = server.vocabulary
    job = Job(
        server,
        head,
        body,
        prompts,
        lambda: CompletionChunks(head, body, prompts, vocabulary),
        lambda outputs: openai.completion_answer(head, body, outputs, vocabulary),
        _record(http, head, body, prompts),
        key_name(http.scope),
    )
    return await job.response(params)


async def create_chat_completion(http: HttpRequest) -> Response:
    """Answer a conversation."""
    raw = await read_body(http)
    chat = await prepare_chat(http, openai.decode(raw), len(raw), "chatcmpl")
    head, body, prompt, parsers = chat.head, chat.body, chat.prompt, chat.parsers
    vocabulary = chat.server.vocabulary
    return await chat.response(
        lambda: ChatChunks(head, body, prompt, vocabulary, parsers),
        lambda output: openai.chat_answer(head, body, output, vocabulary, parsers),
    )


class Chat(NamedTuple):
    """A conversation, ready to be run."""

    server: ServerState
    head: openai.Head
    body: openai.ChatBody
    prompt: Prompt
    params: SamplingParams | None
    """None for a beam search."""
    parsers: openai.Parsers
    record: RequestRecord
    key: str | None
    """Name of the client's key."""

    async def response(
        self,
        events: Callable[[], Events],
        answer: Callable[[RequestOutput], dict[str, Any]],
        fields: Mapping[str, str] | None = None,
    ) -> Response:
        """Return the response, made by `answer`, or as a stream by what `events` returns.

        `fields` are the names that the chat's fields have in another API.
        """
        job = Job(
            self.server,
            self.head,
            self.body,
            [self.prompt],
            events,
            lambda outputs: answer(outputs[0]),
            self.record,
            self.key,
            self.parsers.special_tokens,
            fields or {},
        )
        return await job.response(self.params)


async def prepare_chat(http: HttpRequest, fields: dict[str, Any], size: int, prefix: str) -> Chat:
    """Return the conversation that a chat's `fields` ask for.

    `size` is that of the request's body, in bytes, and the answer's id begins with `prefix`. Raises as the
    conversion of bodies does.
    """
    server = server_of(http)
    frontend = server.frontend
    name = openai.model_name(fields, server.names)
    body = openai.read_chat(fields, server.engine.config.max_logprobs)
    parsers = openai.parsers_of(body, frontend.parsers)
    params = None if body.use_beam_search else openai.chat_params(body, frontend.sampling_defaults)
    options = openai.template_options(body)
    with openai.blaming(body):
        prompt = await off_loop(
            size,
            lambda: frontend.prepare_chat(body.messages, cache_salt=body.cache_salt, **options),
        )
    head = openai.Head(answer_id(http, prefix), int(time.time()), name)
    record = _record(http, head, body, [prompt])
    return Chat(server, head, body, prompt, params, parsers, record, key_name(http.scope))


@contextmanager
def renaming(fields: Mapping[str, str]) -> Generator[None]:
    """Let a RequestError name a field as another API does: `fields` are its names, by those of a chat."""
    try:
        yield
    except RequestError as error:
        name = fields.get(error.param or "")
        if name is None:
            raise
        raise RequestError(str(error), name, error.code) from error


def _record(
    http: HttpRequest, head: openai.Head, body: openai.Body, prompts: Sequence[Prompt]
) -> RequestRecord:
    record = record_of(http)
    record.begin(head.id, [len(prompt.token_ids) for prompt in prompts], body.samples)
    return record


async def _prepared(server: ServerState, body: openai.Body, params: SamplingParams) -> _Prepared:
    """Tokenise the bad words, each by itself, and compile the grammar, in a thread."""
    words, grammar = params.bad_words, None
    cost = sum(len(word) + _EACH_WORD for word in words)
    ids = await off_loop(cost, lambda: server.frontend.bad_word_ids(params)) if words else None
    if params.structured_outputs is not None:
        with openai.blaming(body):
            grammar = await asyncio.to_thread(server.frontend.grammar, params)
    return _Prepared(ids, grammar)


async def _beam_answer(job: Job) -> bytes:
    with openai.blaming(job.body):
        outputs = await search_beams(job.server, job.head, job.body, job.prompts, job.key)
    for index, output in enumerate(outputs):
        job.record.add(index, output)
    return msgspec.json.encode(job.answer(outputs))


async def _whole_answer(job: Job, requests: Sequence[Request]) -> bytes:
    outputs: dict[int, RequestOutput] = {}
    with renaming(job.fields), openai.blaming(job.body):
        async with job.server.open_stream(requests, job.key) as stream:
            async for index, output in stream:
                job.record.add(index, output)
                raise_failure(output)
                outputs[index] = output
    return msgspec.json.encode(job.answer([outputs[index] for index in range(len(requests))]))


async def _events(
    job: Job, requests: Sequence[Request], response: EventStream
) -> AsyncGenerator[bytes, None]:
    """Yield a stream's events; an error is raised while nothing was sent, and is an event later."""
    events = job.events()
    try:
        with renaming(job.fields), openai.blaming(job.body):
            async with job.server.open_stream(requests, job.key) as stream:
                async for index, output in stream:
                    job.record.add(index, output)
                    raise_failure(output)
                    encoded = events.encode(index, output)
                    if encoded:
                        yield encoded
    except RequestAbortedError:
        if not response.started:
            raise
        yield events.abort()
    except Exception as error:
        if not response.started:
            raise
        yield events.error(as_api_error(error))
        return
    yield events.end()
