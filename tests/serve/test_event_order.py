"""Events that are written at once never pass those that wait: for the connection, or for their turn."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast
from weakref import ref

from octavo_serve import answers
from octavo_serve.answers import EventStream
from octavo_serve.protocol import CYCLE


class Connection:
    """A connection that a client reads when the test says so: a `send` waits until then."""

    def __init__(self) -> None:
        self.response_started = self.response_complete = self.disconnected = False
        self.chunked_encoding = False
        self.flow = SimpleNamespace(write_paused=False)
        self.transport = self
        self.sent = b""
        self.writable = asyncio.Event()
        self.writable.set()

    def pause(self) -> None:
        self.flow.write_paused = True
        self.writable.clear()

    def resume(self) -> None:
        self.flow.write_paused = False
        self.writable.set()

    def write(self, data: bytes) -> None:
        self.sent += data

    async def send(self, message: dict[str, Any]) -> None:
        await self.writable.wait()
        self.response_started = True
        self.sent += message.get("body", b"")


async def never() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets that")


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def test_a_stream_is_closed_for_writing_while_an_event_waits_for_a_comment(monkeypatch):
    """A slow reader's comment waits behind an event, and the next event behind the comment."""
    monkeypatch.setattr(answers, "_SECONDS_OF_SILENCE", 0)
    numbers = iter(range(1, 1000))
    written: list[int] = []
    at_once: list[int] = []

    def event() -> bytes:
        written.append(next(numbers))
        return b"%d " % written[-1]

    async def scenario() -> bytes:
        connection = Connection()
        more: asyncio.Queue[None] = asyncio.Queue()

        async def events(stream: EventStream) -> AsyncGenerator[bytes, None]:
            while len(written) < 20:
                yield event()
                if len(written) % 2:
                    continue  # the next one was there already
                await more.get()

        stream = EventStream(events)
        scope = {CYCLE: ref(connection)}
        task = asyncio.create_task(stream(scope, cast(Any, never), cast(Any, connection.send)))
        while not task.done():
            connection.pause()
            more.put_nowait(None)
            await turns(5)  # an event waits for the reader, a comment for the event
            connection.resume()
            for _ in range(10):
                await turns(1)
                if stream.is_open and not task.done():
                    stream.write(event())
                    at_once.append(written[-1])
        return connection.sent

    received = asyncio.run(asyncio.wait_for(scenario(), 60))
    sent = received.replace(b": waiting\n\n", b"").split()
    assert [int(number) for number in sent] == written == sorted(written)
    assert at_once, "no event was written at once"
    assert b": waiting" in received
