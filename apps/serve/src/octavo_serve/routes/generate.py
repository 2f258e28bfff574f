"""POST /v1/completions and /v1/chat/completions, and what they share with the WebSocket."""

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from enginecore import Prompt, Request, RequestOutput, RequestStream, SamplingParams
from enginecore.errors import RequestAbortedError
from enginecore.frontend import openai
from octavo_serve.access import RequestRecord, record_of
from octavo_serve.auth import key_name
from octavo_serve.chunks import (
    DONE,
    EVENT,
    ChatChunks,
    Chunks,
    CompletionChunks,
    Framing,
    error_event,
    line_safe,
)
from octavo_serve.errors import as_api_error
from octavo_serve.responses import EventStream, JsonAnswer
from octavo_serve.routes.requests import answer_id, off_loop, raise_failure, read_body, server_of
from octavo_serve.state import ServerState

_EACH_WORD = 256
"""Characters of a long text that take as long to tokenise as a word that is by itself."""


class Client(NamedTuple):
    """Who asks, as far as the answer, the log and the limits need it."""

    id: str
    """That the answer carries."""
    record: RequestRecord
    key: str | None
    """Name of the client's key."""


class Job(NamedTuple):
    """A body, ready to be run and answered."""

    server: ServerState
    head: openai.Head
    body: openai.Body
    requests: Sequence[Request]
    chunks: Callable[[Framing], Chunks]
    """Makes the encoder of a streamed answer."""
    answer: Callable[[Sequence[RequestOutput]], dict[str, Any]]
    """Makes the whole answer of the requests' final outputs."""
    record: RequestRecord
    key: str | None
    """Name of the client's key."""

    def response(self) -> Response:
        """Return the response, streamed if the body asks for that."""
        if self.body.stream:
            return EventStream(lambda response: _events(self, response))
        return JsonAnswer(_whole_answer(self))

    async def stream(
        self,
        chunks: Chunks,
        started: Callable[[], bool],
        opened: Callable[[RequestStream], None] = lambda stream: None,
    ) -> AsyncGenerator[list[bytes]]:
        """Yield the chunks of each output; leaving early aborts what has not finished.

        `started` says whether the client has been told something: then an abort is the last chunk of each
        choice, and until then it is raised. `opened` is given the stream, for who wants to interrupt it.

        Raises:
            RequestError: a request cannot be run as asked.
            RequestAbortedError: it was aborted before anything was sent.
            ApiError, EngineDeadError: the engine cannot run it, or gave it up.
        """
        try:
            with openai.blaming(self.body):
                async with self.server.open_stream(self.requests, self.key) as stream:
                    opened(stream)
                    async for index, output in stream:
                        self.record.add(index, output)
                        raise_failure(output)
                        yield chunks.encode(index, output)
        except RequestAbortedError:
            if not started():
                raise
            yield chunks.abort()
        yield chunks.end()


async def create_completion(http: HttpRequest) -> Response:
    """Continue one or several prompts."""
    server = server_of(http)
    server.require_ready()
    fields = openai.decode(await read_body(http))
    client = Client(answer_id(http, "cmpl"), record_of(http), key_name(http.scope))
    return (await prepare_completion(server, fields, client)).response()


async def create_chat_completion(http: HttpRequest) -> Response:
    """Answer a conversation."""
    server = server_of(http)
    server.require_ready()
    raw = await read_body(http)
    client = Client(answer_id(http, "chatcmpl"), record_of(http), key_name(http.scope))
    return (await prepare_chat(server, openai.decode(raw), len(raw), client)).response()


async def prepare_completion(server: ServerState, fields: Mapping[str, Any], client: Client) -> Job:
    """Return the job of a completions body, decoded as `fields`.

    Raises:
        RequestError: with the field at fault as its `param`.
        ApiError: 503, no request can be taken now.
    """
    frontend = server.frontend
    model = openai.model_name(fields, server.names)
    body = openai.read_completion(fields, server.engine.config.max_logprobs)
    params = openai.completion_params(body, frontend.sampling_defaults)
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
    limit = server.max_model_len
    each = [openai.fit_default(body, params, len(prompt.token_ids), limit) for prompt in prompts]
    head = openai.Head(client.id, int(time.time()), model)
    vocabulary = server.vocabulary
    return Job(
        server,
        head,
        body,
        _requests(server, head, body, prompts, each, await _bad_words(server, params)),
        lambda framing: CompletionChunks(head, body, prompts, vocabulary, framing),
        lambda outputs: openai.completion_answer(head, body, outputs, vocabulary),
        _begun(client.record, head, body, prompts),
        client.key,
    )


async def prepare_chat(server: ServerState, fields: Mapping[str, Any], size: int, client: Client) -> Job:
    """Return the job of a chat body of `size` bytes; else as `prepare_completion`."""
    frontend = server.frontend
    model = openai.model_name(fields, server.names)
    body = openai.read_chat(fields, server.engine.config.max_logprobs)
    parsers = openai.parsers_of(body, frontend.parsers)
    params = openai.chat_params(body, frontend.sampling_defaults)
    options = openai.template_options(body)
    with openai.blaming(body):
        prompt = await off_loop(
            size,
            lambda: frontend.prepare_chat(body.messages, cache_salt=body.cache_salt, **options),
        )
    params = openai.fit_default(body, params, len(prompt.token_ids), server.max_model_len)
    head = openai.Head(client.id, int(time.time()), model)
    vocabulary = server.vocabulary
    return Job(
        server,
        head,
        body,
        _requests(
            server,
            head,
            body,
            [prompt],
            [params],
            await _bad_words(server, params),
            parsers.special_tokens,
        ),
        lambda framing: ChatChunks(head, body, prompt, vocabulary, parsers, framing),
        lambda outputs: openai.chat_answer(head, body, outputs[0], vocabulary, parsers),
        _begun(client.record, head, body, [prompt]),
        client.key,
    )


def _requests(
    server: ServerState,
    head: openai.Head,
    body: openai.Body,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    bad_words: list[list[int]] | None,
    shown_tokens: Sequence[str] = (),
) -> list[Request]:
    # Numbered, since two clients may choose the same id.
    return [
        Request(
            f"{head.id}-{next(server.numbers)}", prompt, wanted, body.priority or 0, bad_words, shown_tokens
        )
        for prompt, wanted in zip(prompts, params, strict=True)
    ]


def _begun(
    record: RequestRecord, head: openai.Head, body: openai.Body, prompts: Sequence[Prompt]
) -> RequestRecord:
    record.begin(head.id, [len(prompt.token_ids) for prompt in prompts], body.samples)
    return record


async def _bad_words(server: ServerState, params: SamplingParams) -> list[list[int]] | None:
    """Return the tokens of the bad words, each of which is tokenised by itself."""
    words = params.bad_words
    cost = sum(len(word) + _EACH_WORD for word in words)
    return await off_loop(cost, lambda: server.frontend.bad_word_ids(params)) if words else None


async def _whole_answer(job: Job) -> bytes:
    outputs: dict[int, RequestOutput] = {}
    with openai.blaming(job.body):
        async with job.server.open_stream(job.requests, job.key) as stream:
            async for index, output in stream:
                job.record.add(index, output)
                raise_failure(output)
                outputs[index] = output
    return msgspec.json.encode(job.answer([outputs[index] for index in range(len(job.requests))]))


async def _events(job: Job, response: EventStream) -> AsyncGenerator[bytes, None]:
    """Yield a stream's events; an error is raised while nothing was sent, and is an event later."""
    try:
        async with aclosing(job.stream(job.chunks(EVENT), lambda: response.started)) as stream:
            async for events in stream:
                if events:
                    yield line_safe(b"".join(events))
    except Exception as error:
        if not response.started:
            raise
        yield error_event(as_api_error(error))
        return
    yield DONE
