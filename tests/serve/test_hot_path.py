"""The way of a token from a core's message to the socket: what it costs, counted."""

import asyncio
import itertools
import json
import sys
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from weakref import ref

import pytest

from byte_tokenizer import ROLES, backend
from enginecore import Prompt, RequestStream, SamplingParams
from enginecore.frontend import openai
from enginecore.frontend.parsing import Parsers
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.sampling_params import RequestOutputKind
from front_ends import front, step
from octavo_serve.chunks import ChatChunks, CompletionChunks
from octavo_serve.protocol import CYCLE
from octavo_serve.records import RequestRecord
from octavo_serve.routes.generate import Job
from octavo_serve.routes.requests import Client

TOKENS = 50
CALLS_A_TOKEN = 40
"""Python functions called for a token of one stream, from a core's message to the socket.

There were 37 when this was written, those of the step itself included.
"""


class Cycle:
    """The connection, as far as a `BodyWriter` looks at it."""

    def __init__(self) -> None:
        self.response_started = self.response_complete = self.disconnected = False
        self.chunked_encoding = True
        self.flow = SimpleNamespace(write_paused=False)
        self.transport = self
        self.sent = b""
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)
        self.sent += data

    async def send(self, message: dict[str, Any]) -> None:
        self.response_started = True
        body = message.get("body", b"")
        if body:
            self.sent += b"%x\r\n%b\r\n" % (len(body), body)


async def never() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets that")


def texts(sent: bytes) -> list[str]:
    """The text of each event that has some, once the chunks' framing is checked."""
    found, position = [], 0
    while position < len(sent):
        size, _, rest = sent[position:].partition(b"\r\n")
        chunk = rest[: int(size, 16)]
        assert rest[len(chunk) : len(chunk) + 2] == b"\r\n"
        position += len(size) + 2 + len(chunk) + 2
        for event in chunk.removesuffix(b"\n\n").split(b"\n\n"):
            if event != b"data: [DONE]":
                [choice] = json.loads(event.removeprefix(b"data: "))["choices"]
                found.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return [text for text in found if text]


class Streaming:
    """One streamed answer, whose tokens come when a test says so."""

    def __init__(self, kind: str) -> None:
        self.frontend = front(Tokenizer(backend(), special_tokens=ROLES))
        vocabulary = self.frontend.tokenizer
        assert vocabulary is not None
        self.cycle = Cycle()
        prompt = Prompt("a", [97])
        head = openai.Head("id", 1, "m")
        fields: dict[str, Any] = {"stream": True, "max_tokens": TOKENS, "ignore_eos": True}
        if kind == "chat":
            chat = openai.read_chat({**fields, "messages": [{"role": "user", "content": "a"}]}, 20)
            body: openai.Body = chat
            parsers = openai.parsers_of(chat, Parsers())
            events: Any = partial(ChatChunks, head, chat, prompt, vocabulary, parsers)
        else:
            completion = openai.read_completion({**fields, "prompt": "a"}, 20)
            body = completion
            events = partial(CompletionChunks, head, completion, [prompt], vocabulary)
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        server = SimpleNamespace(
            frontend=self.frontend,
            open_stream=self._open,
            numbers=itertools.count(),
            max_model_len=64,
        )
        client = Client("id", RequestRecord(), None)
        self._response = Job(
            cast(Any, server), head, body, [prompt], params, events, lambda outputs: {}, client
        )

    @asynccontextmanager
    async def _open(self, requests: Any, key: str | None) -> Any:
        added = self.frontend.add(requests[0])
        self._state, [message] = added.state, added.messages
        self._number = message.number
        self._stream = RequestStream([self._state], lambda stream: None)
        async with self._stream:
            yield self._stream

    async def run(self) -> int:
        """Give all tokens; return the Python calls between the first and the last."""
        scope = {CYCLE: ref(self.cycle)}
        response = self._response.response()
        task = asyncio.create_task(response(scope, never, cast(Any, self.cycle.send)))
        await settle()
        self.say()
        await settle()
        calls = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            for _ in range(TOKENS - 2):
                self.say()
        finally:
            sys.setprofile(None)
        self.say(2)
        await task
        return calls

    def say(self, code: int = 0) -> None:
        """Take a token as `AsyncEngine` does."""
        for state in self.frontend.process(step((self._number, 97, code))).changed:
            if state.has_output:
                self._stream.notify(state)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_a_token_goes_to_the_socket_in_few_calls_and_wakes_nobody(kind):
    async def scenario():
        streaming = Streaming(kind)
        return streaming, await streaming.run()

    streaming, calls = asyncio.run(scenario())
    assert texts(streaming.cycle.sent) == ["a"] * TOKENS
    # All but the first and the last, which a task sends: written before `say` returned.
    assert len(streaming.cycle.written) == TOKENS - 2
    assert calls / (TOKENS - 2) <= CALLS_A_TOKEN
