"""POST /v1/completions and /v1/chat/completions, and what they share with other APIs and the WebSocket."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, NamedTuple, Protocol

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from enginecore import Prompt, Request, RequestOutput, RequestStream, SamplingParams
from enginecore.errors import RequestAbortedError, RequestError
from enginecore.frontend import openai
from octavo_serve.access import record_of
from octavo_serve.answers import EventStream, JsonAnswer
from octavo_serve.auth import key_name
from octavo_serve.chunks import EVENT, ChatChunks, CompletionChunks, Framing, line_safe
from octavo_serve.errors import ApiError, as_api_error
from octavo_serve.routes.beams import search_beams
from octavo_serve.routes.requests import Client, answer_id, off_loop, raise_failure, read_body, server_of
from octavo_serve.state import ServerState

_EACH_WORD = 256
"""Characters of a long text that take as long to tokenise as a word that is by itself."""


class Events(Protocol):
    """Encodes the outputs of a request as events of its stream."""

    closing: bytes
    """What follows the last event."""

    def encode(self, prompt: int, output: RequestOutput) -> list[bytes]:
        """Return the events for an output of prompt number `prompt`."""
        ...

    def end(self) -> list[bytes]:
        """Return the events that follow the last output."""
        ...

    def abort(self) -> list[bytes]:
        """Return the last events of what has not finished; `end` follows."""
        ...

    def error(self, error: ApiError) -> bytes:
        """Return the events that end a stream which has begun."""
        ...

    def usage(self) -> dict[str, Any]:
        """Return the usage of what has been encoded."""
        ...


class Names(NamedTuple):
    """Names that a chat's fields have in the API that a request came by, where they have others there."""

    fields: Mapping[str, str] = {}
    parts: Mapping[str, str] = {}
    """Of parts of fields, as messages have them."""


CHAT_NAMES = Names()


class Job(NamedTuple):
    """A body, ready to be run and answered."""

    server: ServerState
    head: openai.Head
    body: openai.Body
    prompts: Sequence[Prompt]
    params: SamplingParams | None
    """None for a beam search."""
    events: Callable[[Framing], Events]
    """Makes the encoder of a streamed answer."""
    answer: Callable[[Sequence[RequestOutput]], dict[str, Any]]
    """Makes the whole answer of the prompts' final outputs."""
    client: Client
    shown_tokens: Sequence[str] = ()
    """Special tokens that the text shows."""
    thinking: openai.Thinking | None = None
    """Reasoning after which the answer has the form that `params` ask for."""
    names: Names = CHAT_NAMES
    """What `body` is called in the API that it was asked by."""

    def response(self) -> Response:
        """Return the response, streamed if the body asks for that."""
        if self.params is None:
            return JsonAnswer(_beam_answer(self))
        if self.body.stream:
            return EventStream(lambda response: _events(self, response))
        return JsonAnswer(_whole_answer(self))

    async def stream(
        self,
        events: Events,
        started: Callable[[], bool],
        opened: Callable[[RequestStream], None] = lambda stream: None,
    ) -> AsyncGenerator[list[bytes]]:
        """Yield the events of each output; leaving early aborts what has not finished.

        `started` says whether the client has been told something: then an abort is the last event of each
        choice, and until then it is raised. `opened` is given the stream, for who wants to interrupt it.

        Raises:
            RequestError: a request cannot be run as asked.
            RequestAbortedError: it was aborted before anything was sent.
            ApiError, EngineDeadError: the engine cannot run it, or gave it up.
        """
        try:
            with renaming(self.names), openai.blaming(self.body):
                requests = await self.requests()
                async with self.server.open_stream(requests, self.client.key) as stream:
                    opened(stream)
                    self.client.record.follow(stream)
                    async for index, output in stream:
                        yield self.encode(events, index, output)
        except RequestAbortedError:
            if not started():
                raise
            self.client.record.failure = "aborted"
            yield events.abort()
        yield events.end()

    def encode(self, events: Events, index: int, output: RequestOutput) -> list[bytes]:
        """Return the events of an output of prompt number `index`, once it is in the log's record.

        Raises:
            ApiError: the request failed.
        """
        self.client.record.add(index, output)
        raise_failure(output)
        return events.encode(index, output)

    async def requests(self) -> list[Request]:
        """Return a request for each prompt, once bad words are tokenised and a grammar is compiled.

        Raises:
            RequestError: one of these is wrong.
        """
        server, body, params = self.server, self.body, self.params
        assert params is not None, "a beam search makes requests of its own"
        bad_words, grammar = await _bad_words(server, params), None
        if params.structured_outputs is not None:
            grammar = await asyncio.to_thread(server.frontend.grammar, params, self.thinking)
        # Numbered, since two clients may choose the same id.
        return [
            Request(
                f"{self.head.id}-{next(server.numbers)}",
                prompt,
                openai.fit_default(body, params, len(prompt.token_ids), server.max_model_len),
                body.priority or 0,
                shown_tokens=self.shown_tokens,
                bad_word_ids=bad_words,
                grammar=grammar,
            )
            for prompt in self.prompts
        ]


class Chat(NamedTuple):
    """A conversation, ready to be run."""

    server: ServerState
    head: openai.Head
    body: openai.ChatBody
    prompt: Prompt
    params: SamplingParams | None
    """None for a beam search."""
    parsers: openai.Parsers
    client: Client

    def job(
        self,
        events: Callable[[Framing], Events],
        answer: Callable[[RequestOutput], dict[str, Any]],
        names: Names = CHAT_NAMES,
    ) -> Job:
        """Return the job, answered by `answer`, or as a stream by what `events` returns."""
        return Job(
            self.server,
            self.head,
            self.body,
            [self.prompt],
            self.params,
            events,
            lambda outputs: answer(outputs[0]),
            self.client,
            self.parsers.special_tokens,
            openai.thinking_of(self.body, self.parsers, self.prompt.text or ""),
            names,
        )


async def create_completion(http: HttpRequest) -> Response:
    """Continue one or several prompts."""
    server = server_of(http)
    server.require_ready()
    fields = openai.decode(await read_body(http))
    return (await prepare_completion(server, fields, client_of(http, "cmpl"))).response()


async def create_chat_completion(http: HttpRequest) -> Response:
    """Answer a conversation."""
    server = server_of(http)
    server.require_ready()
    raw = await read_body(http)
    job = await prepare_chat_completion(server, openai.decode(raw), len(raw), client_of(http, "chatcmpl"))
    return job.response()


def client_of(http: HttpRequest, prefix: str) -> Client:
    """Return who sent an HTTP request; the id of the answer begins with `prefix`."""
    return Client(answer_id(http, prefix), record_of(http), key_name(http.scope))


async def prepare_completion(server: ServerState, fields: Mapping[str, Any], client: Client) -> Job:
    """Return the job of a completions body, decoded as `fields`.

    Raises:
        RequestError: with the field at fault as its `param`.
        ApiError: 503, no request can be taken now.
    """
    frontend = server.frontend
    model = openai.model_name(fields, server.names)
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
    head = openai.Head(client.id, int(time.time()), model)
    vocabulary = server.vocabulary
    lengths = [len(prompt.token_ids) for prompt in prompts]
    client.record.begin(head, lengths, body.samples, params, streams=bool(body.stream))
    return Job(
        server,
        head,
        body,
        prompts,
        params,
        lambda framing: CompletionChunks(head, body, prompts, vocabulary, framing),
        lambda outputs: openai.completion_answer(head, body, outputs, vocabulary),
        client,
    )


async def prepare_chat_completion(
    server: ServerState, fields: Mapping[str, Any], size: int, client: Client
) -> Job:
    """Return the job of a chat body of `size` bytes; else as `prepare_completion`."""
    chat = await prepare_chat(server, fields, size, client)
    head, body, prompt, parsers, vocabulary = (
        chat.head,
        chat.body,
        chat.prompt,
        chat.parsers,
        server.vocabulary,
    )
    return chat.job(
        lambda framing: ChatChunks(head, body, prompt, vocabulary, parsers, framing),
        lambda output: openai.chat_answer(head, body, output, vocabulary, parsers),
    )


async def prepare_chat(server: ServerState, fields: Mapping[str, Any], size: int, client: Client) -> Chat:
    """Return the conversation of a chat body of `size` bytes; raises as `prepare_completion`."""
    frontend = server.frontend
    model = openai.model_name(fields, server.names)
    body = openai.read_chat(fields, server.engine.config.max_logprobs)
    parsers = openai.parsers_of(body, frontend.parsers)
    params = None if body.use_beam_search else openai.chat_params(body, frontend.sampling_defaults)
    options = openai.template_options(body)
    with openai.blaming(body):
        prompt = await off_loop(
            size,
            lambda: frontend.prepare_chat(body.messages, cache_salt=body.cache_salt, **options),
        )
    head = openai.Head(client.id, int(time.time()), model)
    lengths = [len(prompt.token_ids)]
    client.record.begin(head, lengths, body.samples, params, streams=bool(body.stream))
    return Chat(server, head, body, prompt, params, parsers, client)


@contextmanager
def renaming(names: Names) -> Generator[None]:
    """Let a RequestError name a chat's field as another API does, as its `param` and in its message."""
    try:
        yield
    except RequestError as error:
        message = str(error)
        param = names.fields.get(error.param or "", error.param)
        if error.param not in (None, param, "prompt"):  # all APIs speak of a prompt that is too long
            message = re.sub(rf"\b{error.param}\b", str(param), message)
        for part, other in names.parts.items():
            message = message.replace(part, other)
        raise RequestError(message, param, error.code) from error


async def _bad_words(server: ServerState, params: SamplingParams) -> list[list[int]] | None:
    """Return the tokens of the bad words, each of which is tokenised by itself."""
    words = params.bad_words
    cost = sum(len(word) + _EACH_WORD for word in words)
    return await off_loop(cost, lambda: server.frontend.bad_word_ids(params)) if words else None


async def _beam_answer(job: Job) -> bytes:
    with openai.blaming(job.body):
        outputs = await search_beams(job.server, job.head, job.body, job.prompts, job.client)
    for index, output in enumerate(outputs):
        job.client.record.add(index, output)
    return msgspec.json.encode(job.answer(outputs))


async def _whole_answer(job: Job) -> bytes:
    outputs: dict[int, RequestOutput] = {}
    with renaming(job.names), openai.blaming(job.body):
        requests = await job.requests()
        async with job.server.open_stream(requests, job.client.key) as stream:
            job.client.record.follow(stream)
            async for index, output in stream:
                job.client.record.add(index, output)
                raise_failure(output)
                outputs[index] = output
    return msgspec.json.encode(job.answer([outputs[index] for index in range(len(requests))]))


class _Relay:
    """Encodes outputs and writes them to their client within the engine's own delivery."""

    def __init__(self, job: Job, events: Events, response: EventStream) -> None:
        self._job = job
        self._events = events
        self._response = response

    @property
    def is_open(self) -> bool:
        return self._response.is_open

    def take(self, index: int, output: RequestOutput) -> None:
        encoded = self._job.encode(self._events, index, output)
        if encoded:
            self._response.write(line_safe(b"".join(encoded)))


async def _events(job: Job, response: EventStream) -> AsyncGenerator[bytes, None]:
    """Yield a stream's events; an error is raised while nothing was sent, and is an event later.

    Those which the connection takes at once are written to it and not yielded.
    """
    events = job.events(EVENT)
    relay = _Relay(job, events, response)
    try:
        streaming = job.stream(events, lambda: response.started, lambda stream: stream.pass_to(relay))
        async with aclosing(streaming) as stream:
            async for encoded in stream:
                if encoded:
                    yield line_safe(b"".join(encoded))
    except Exception as error:
        if not response.started:
            raise
        told = as_api_error(error)
        job.client.record.failure = str(told.status)
        yield events.error(told)
        return
    if events.closing:
        yield events.closing
