"""The stream of a request's outputs: read one by one, or passed to a sink the moment they are there."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginecore import Prompt, Request, RequestOutput, RequestStream, SamplingParams
from enginecore.frontend.frontend import Frontend
from front_ends import DELTA, front, step

TOKENS = 12


class Sink:
    """Notes what it is passed."""

    def __init__(self, heard: list[int]) -> None:
        self.is_open = False
        self.error: Exception | None = None
        self.passed = 0
        self._heard = heard

    def take(self, index: int, output: RequestOutput) -> None:
        if self.error is not None:
            raise self.error
        self.passed += 1
        self._heard += output.outputs[0].token_ids


class Told:
    """A stream of one request whose tokens come when a test says so, with its reader."""

    def __init__(self) -> None:
        self.frontend: Frontend = front(None)
        params = SamplingParams(max_tokens=TOKENS, output_kind=DELTA)
        added = self.frontend.add(Request("r", Prompt(None, [1]), params))
        self.state, [message] = added.state, added.messages
        self._number = message.number
        self.aborted: list[RequestStream] = []
        self.stream = RequestStream([self.state], self.aborted.append)
        self.heard: list[int] = []
        """Tokens, in the order in which the reader and the sink got them."""
        self.sink = Sink(self.heard)
        self.stream.pass_to(self.sink)
        self.read = 0
        self.reading = asyncio.Event()
        self.task = asyncio.create_task(self._read())

    def say(self, token: int, code: int = 0) -> None:
        self.frontend.process(step((self._number, token, code)))
        self.stream.notify(self.state)

    async def _read(self) -> None:
        await self.reading.wait()
        async with self.stream:
            async for _, output in self.stream:
                self.read += 1
                self.heard += output.outputs[0].token_ids
                await self.reading.wait()


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=TOKENS, max_size=TOKENS))
def test_nothing_is_lost_or_out_of_order_whoever_takes_it(turns):
    """Before each token the sink is open or not, the reader reads or not, and has time to or not."""

    async def scenario():
        told = Told()
        for token, (is_open, reads, settles) in enumerate(turns, 1):
            told.sink.is_open = is_open
            if reads:
                told.reading.set()
            else:
                told.reading.clear()
            told.say(token, 2 if token == TOKENS else 0)
            if settles:
                await settle()
        told.reading.set()
        await told.task
        return told

    told = asyncio.run(scenario())
    assert told.heard == list(range(1, TOKENS + 1))
    assert told.read >= 1


def test_an_open_sink_takes_all_but_the_last_output():
    async def scenario():
        told = Told()
        told.reading.set()
        told.sink.is_open = True
        await settle()
        for token in range(1, TOKENS):
            told.say(token)
        assert (told.sink.passed, told.read) == (TOKENS - 1, 0)
        told.say(TOKENS, 2)
        await told.task
        assert (told.sink.passed, told.read) == (TOKENS - 1, 1)
        return told.heard

    assert asyncio.run(scenario()) == list(range(1, TOKENS + 1))


def test_the_reader_gets_what_the_sink_raises_and_the_request_is_aborted():
    async def scenario():
        told = Told()
        told.reading.set()
        told.sink.is_open = True
        told.say(1)
        told.sink.error = ValueError("no")
        told.say(2)
        with pytest.raises(ValueError, match="no"):
            await told.task
        return told

    told = asyncio.run(scenario())
    assert told.heard == [1]
    assert told.aborted == [told.stream]
