"""Requests are sent to ranks, and to others when a rank has ended; ranks are records of messages here."""

import asyncio
from typing import ClassVar

import pytest

from enginecore.data_parallel import dispatcher as module
from enginecore.data_parallel.dispatcher import Dispatcher
from enginecore.errors import ModelError
from enginecore.frontend.request import Prompt, Request
from enginecore.messages import (
    AbortRequests,
    AddRequest,
    EngineLimits,
    RankDown,
    RankOut,
    RankUp,
    ResetPrefixCache,
)
from enginecore.sampling_params import SamplingParams
from front_ends import front, step

LIMITS = EngineLimits(max_model_len=64, vocab_size=320, num_blocks=8, block_size=16)
FRONTEND = 3
RUNNING, LENGTH = 0, 2
pytestmark = pytest.mark.anyio


class Client:
    """A connection to a core that notes what is sent, and receives what a test puts in."""

    made: ClassVar[dict[str, "Client"]] = {}

    def __init__(self, address, frontend):
        assert frontend == FRONTEND
        self.sent = []
        self.received: asyncio.Queue = asyncio.Queue()
        self.closed = False
        Client.made[address] = self

    def send(self, message):
        assert not self.closed
        self.sent.append(message)

    async def receive(self):
        return await self.received.get()

    @property
    def has_more(self):
        return not self.received.empty()

    def close(self):
        self.closed = True

    @property
    def added(self):
        return [message for message in self.sent if isinstance(message, AddRequest)]


class Ranks:
    """A dispatcher over ranks that go up and down, with its front-end."""

    def __init__(self, count):
        self.frontend = front(None)
        self.dispatcher = Dispatcher(range(count), self.frontend, FRONTEND)
        self.dispatcher.on_outputs = self._take
        self.dispatcher.on_caught_up = lambda: self.heard.append(len(self.taken))
        self.taken = []
        self.heard = []
        """How many outputs had been taken, whenever callers were to hear of them."""
        self.states = {}
        self.errors = {}
        self._starts = [0] * count

    def _take(self, rank, outputs):
        self.taken.append(outputs)
        self.errors |= outputs.errors
        self.frontend.process(outputs)

    def up(self, rank):
        address = f"ipc:///{rank}-{self._starts[rank]}"
        self.dispatcher.take(RankUp(rank, self._starts[rank], address, LIMITS))
        self._starts[rank] += 1
        return Client.made[address]

    def down(self, rank, *suspects, alone=False):
        found = [(FRONTEND, number) for number in suspects]
        self.dispatcher.take(RankDown(rank, self._starts[rank] - 1, "killed", found, alone))

    def ask(self, name, n=1):
        """Send a request of 3 tokens and return the numbers of its samples."""
        params = SamplingParams(n=n, max_tokens=20)
        added = self.frontend.add(Request(name, Prompt(None, [1, 2, 3]), params))
        self.states[name] = added.state
        self.dispatcher.send(added.messages)
        return [message.number for message in added.messages]


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
async def ranks(monkeypatch):
    monkeypatch.setattr(module, "CoreClient", Client)
    monkeypatch.setattr(Client, "made", {})
    made: list[Ranks] = []

    def make(count):
        made.append(Ranks(count))
        return made[0]

    yield make
    for one in made:
        one.dispatcher.close()


async def settle():
    """Let what has been received be read."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_spread_evenly_and_samples_stay_together(ranks):
    many = ranks(4)
    clients = [many.up(rank) for rank in range(4)]
    for number in range(64):
        many.ask(str(number))
    assert [len(client.added) for client in clients] == [16] * 4
    numbers = many.ask("four", n=4)
    had = [client for client in clients if any(message.number in numbers for message in client.added)]
    assert len(had) == 1


async def test_what_has_ended_makes_room(ranks):
    two = ranks(2)
    clients = [two.up(rank) for rank in range(2)]
    first = [two.ask(str(index)) for index in range(4)]
    ended = [number for [number] in first if any(m.number == number for m in clients[1].added)]
    clients[1].received.put_nowait(step(*((number, 5, LENGTH) for number in ended)))
    await settle()
    for index in range(4, 6):
        two.ask(str(index))
    assert [len(client.added) for client in clients] == [2, 4]


async def test_requests_wait_in_order_while_no_rank_is_up(ranks):
    one = ranks(1)
    numbers = [one.ask(name)[0] for name in "abc"]
    one.dispatcher.abort(numbers[1:2])
    client = one.up(0)
    assert [message.number for message in client.added] == [numbers[0], numbers[2]]


async def test_requests_of_a_rank_that_ends_go_on_after_their_tokens_on_another(ranks):
    two = ranks(2)
    clients = [two.up(rank) for rank in range(2)]
    for name in "ab":
        two.ask(name)
    [lost] = [message.number for message in clients[0].added]
    clients[0].received.put_nowait(step((lost, 7, RUNNING), (lost, 8, RUNNING)))
    await settle()
    two.down(0)
    assert clients[0].closed
    assert two.dispatcher.down == {0: "killed"}
    again = clients[1].added[-1]
    assert again.generated.tolist() == [7, 8]
    assert again.prompt.tolist() == [1, 2, 3]
    assert again.number != lost
    assert not again.alone


async def test_requests_of_the_only_rank_go_on_once_it_is_up_again(ranks):
    one = ranks(1)
    first = one.up(0)
    [number] = one.ask("a")
    first.received.put_nowait(step((number, 7, RUNNING)))
    await settle()
    one.down(0)
    assert one.dispatcher.up == []
    second = one.up(0)
    [again] = second.added
    assert again.generated.tolist() == [7]
    # What the first start still had on the way is not for anybody.
    first.received.put_nowait(step((number, 9, RUNNING)))
    await settle()
    second.received.put_nowait(step((again.number, 9, RUNNING)))
    await settle()
    [sample] = one.states["a"].samples
    assert sample.num_tokens == 2


async def test_each_sample_is_resumed_by_itself(ranks):
    two = ranks(2)
    clients = [two.up(rank) for rank in range(2)]
    numbers = two.ask("a", n=3)
    holder = 0 if clients[0].added else 1
    clients[holder].received.put_nowait(step((numbers[0], 5, LENGTH), (numbers[1], 6, RUNNING)))
    await settle()
    two.down(holder)
    assert [message.generated.tolist() for message in clients[1 - holder].added] == [[6], []]


async def test_a_request_in_two_steps_that_ended_a_core_runs_alone_and_fails_if_it_ends_two_alone(ranks):
    one = ranks(1)
    trials = []
    one.up(0)
    numbers = {name: one.ask(name)[0] for name in ("culprit", "other")}
    for _ in range(2):
        one.down(0, *numbers.values())
        culprit, other = one.up(0).added
        trials.append((culprit.alone, other.alone))
        numbers = {"culprit": culprit.number, "other": other.number}
    assert trials == [(False, False), (True, True)]
    one.down(0, numbers["culprit"], alone=True)
    assert one.errors == {}
    culprit, other = one.up(0).added
    assert culprit.alone
    one.down(0, culprit.number, alone=True)
    [said] = one.errors.values()
    assert said.endswith("in the end with nothing else: killed")
    assert one.states["culprit"].unfinished == 0
    [other] = one.up(0).added
    assert one.states["other"].unfinished == 1


async def test_a_death_with_others_convicts_nobody(ranks):
    one = ranks(1)
    one.up(0)
    numbers = [one.ask(name)[0] for name in "ab"]
    for _ in range(5):
        one.down(0, *numbers)
        numbers = [message.number for message in one.up(0).added]
    assert len(numbers) == 2
    assert one.errors == {}


async def test_suspects_of_other_front_ends_are_not_taken_for_its_own(ranks):
    one = ranks(1)
    one.up(0)
    [number] = one.ask("a")
    for _ in range(3):
        one.dispatcher.take(RankDown(0, 0, "killed", [(FRONTEND + 1, number)], alone=True))
        [again] = one.up(0).added
        assert not again.alone
        number = again.number
    assert one.errors == {}


async def test_aborts_go_to_the_rank_that_has_the_sample_now(ranks):
    two = ranks(2)
    clients = [two.up(rank) for rank in range(2)]
    for name in "ab":
        two.ask(name)
    two.down(0)
    kept, moved = clients[1].added
    two.dispatcher.abort([kept.number, moved.number])
    assert clients[1].sent[-1] == AbortRequests([kept.number, moved.number])
    # Unknown by now: nothing is sent.
    two.dispatcher.abort([kept.number])
    assert len(clients[1].sent) == 3


async def test_outputs_that_have_come_together_are_told_together(ranks):
    one = ranks(1)
    client = one.up(0)
    [number] = one.ask("a")
    for count in (1, 3):
        for _ in range(count):
            client.received.put_nowait(step((number, 97, RUNNING)))
        await settle()
    assert one.heard == [1, 4]


async def test_a_rank_that_always_has_more_is_not_read_for_ever(ranks, monkeypatch):
    monkeypatch.setattr(module, "_LONGEST_READ", 0.0)
    one = ranks(1)
    client = one.up(0)
    [number] = one.ask("a")
    for _ in range(3):
        client.received.put_nowait(step((number, 97, RUNNING)))
    turns = []

    async def others():
        while len(one.taken) < 3:
            turns.append(len(one.taken))
            await asyncio.sleep(0)

    await others()
    assert one.heard == [1, 2, 3]
    assert {1, 2} <= set(turns)


async def test_all_ranks_that_are_up_are_told(ranks):
    three = ranks(3)
    clients = [three.up(rank) for rank in range(2)]
    three.dispatcher.broadcast(ResetPrefixCache())
    assert [client.sent for client in clients] == [[ResetPrefixCache()]] * 2


async def test_ready_waits_for_all_ranks(ranks):
    two = ranks(2)
    ready = asyncio.create_task(two.dispatcher.ready())
    two.up(0)
    await settle()
    assert not ready.done()
    two.up(1)
    limits = await ready
    assert limits.num_blocks == 8


async def test_a_rank_that_cannot_load_fails_the_start(ranks):
    two = ranks(2)
    ready = asyncio.create_task(two.dispatcher.ready())
    two.up(0)
    await settle()
    two.dispatcher.take(RankOut(1, "there is no folder m", ever_up=False))
    with pytest.raises(ModelError, match="there is no folder m"):
        await ready


async def test_the_engine_has_ended_when_the_last_rank_is_given_up(ranks):
    two = ranks(2)
    clients = [two.up(rank) for rank in range(2)]
    two.ask("a")
    two.down(0)
    two.dispatcher.take(RankOut(0, "too often", ever_up=True))
    assert two.dispatcher.failure is None
    assert len(clients[1].added) == 1
    two.down(1)
    two.dispatcher.take(RankOut(1, "too often as well", ever_up=True))
    assert two.dispatcher.failure == "too often as well"
    assert two.dispatcher.out == {0: "too often", 1: "too often as well"}
