"""Waves of a group of engines, played with every order of messages, steps, requests and coordinators."""

from collections import deque
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginecore.core import lockstep
from enginecore.core.lockstep import Lockstep
from enginecore.data_parallel.coordinator import Coordinator
from enginecore.data_parallel.messages import NeedWave, RegisterAgain, RegisterRank, StartWave, WaveEnded


@pytest.fixture(autouse=True)
def asks_often():
    with patch.object(lockstep, "STEPS_TO_ASK", 3):
        yield


def begun(waves=1):
    engine = Lockstep(0)
    for wave in range(1, waves + 1):
        engine.receive(StartWave(wave))
    return engine


def run_to_question(engine, unfinished):
    """Start steps until one asks, and return how many."""
    for count in range(1, 100):
        if engine.start(empty=not unfinished, unfinished=unfinished) is not None:
            return count
    raise AssertionError("no step asked")


def test_nothing_is_started_until_a_question_is_answered():
    engine = begun()
    assert run_to_question(engine, True) == 3
    assert (engine.running, engine.may_start) == (True, False)
    engine.answer(True)
    assert engine.may_start
    assert run_to_question(engine, False) == 3
    engine.answer(False)
    assert not engine.running
    assert engine.messages(False) == [WaveEnded(0, 1, 6, 3)]
    assert engine.messages(False) == []


def test_a_question_carries_whether_there_are_requests():
    engine = begun()
    assert [engine.start(empty=True, unfinished=False) for _ in range(3)] == [None, None, False]


def test_a_wave_is_asked_for_once():
    engine = Lockstep(4)
    assert engine.messages(False) == []
    assert engine.messages(True) == [NeedWave(4, 0)]
    assert engine.messages(True) == []
    engine.receive(StartWave(1))
    assert engine.messages(True) == []
    run_to_question(engine, False)
    engine.answer(False)
    assert engine.messages(True) == [WaveEnded(4, 1, 3, 3), NeedWave(4, 1)]


def test_the_next_wave_may_be_announced_before_the_end_of_one_and_no_later_one():
    engine = begun()
    for wave in (1, 3, 2, 3, 2):
        engine.receive(StartWave(wave))
    for ended in (1, 2):
        assert engine.running
        run_to_question(engine, False)
        engine.answer(False)
        assert engine.ended == ended
    assert not engine.running


def test_waves_that_have_ended_are_not_begun_again():
    engine = begun()
    run_to_question(engine, False)
    engine.answer(False)
    engine.receive(StartWave(1))
    assert not engine.running
    engine.receive(StartWave(2))
    assert engine.running


class Engine:
    """An engine as its loop drives it: requests are numbers of steps that they have yet to run."""

    def __init__(self, number, count, depth):
        self.number = number
        self.depth = depth
        self.steps = Lockstep(number)
        self.requests = []
        self.started = []
        """What each step since the beginning told: None, or whether there are requests."""
        self.collected = 0
        self.waits = False
        self.inbox = deque()
        self.outbox = deque()
        self.registration = RegisterRank(
            number, count, incarnation=0, num_blocks=8, max_num_seqs=8, group=0, wave=0
        )
        self.need = None
        self.register()

    def register(self):
        """Send what a link sends every second."""
        self.outbox.append(self.registration)
        self.registration = msgspec.structs.replace(self.registration, again=True)
        if self.need is not None:
            self.outbox.append(self.need)

    def turn(self):
        """Speak with the coordinator, start steps, and wait for the oldest if there are any."""
        for message in self.steps.messages(bool(self.requests)):
            if isinstance(message, NeedWave):
                self.need = message
            else:
                self.registration = msgspec.structs.replace(self.registration, wave=message.wave)
            self.outbox.append(message)
        while self.inbox:
            message = self.inbox.popleft()
            if isinstance(message, RegisterAgain):
                self.register()
            elif isinstance(message, StartWave):
                if self.need is not None and message.wave > self.need.wave:
                    self.need = None
                self.steps.receive(message)
        while len(self.started) - self.collected < self.depth and self.steps.may_start:
            empty = not self.requests
            self.started.append(self.steps.start(empty=empty, unfinished=not empty))
            self.requests = [left - 1 for left in self.requests if left > 1]
        self.waits = self.collected < len(self.started)

    def collect(self, answer):
        self.collected += 1
        self.waits = False
        if answer is not None:
            self.steps.answer(answer)


class Group:
    """Engines and their coordinator; links deliver in order, each in its own time."""

    def __init__(self, count, depth):
        self.engines = [Engine(number, count, depth) for number in range(count)]
        self.coordinator = Coordinator(0.0)
        self.waves = 0

    def send(self, engine):
        """Deliver one message of an engine to the coordinator."""
        if engine.outbox:
            sends = self.coordinator.receive(b"%d" % engine.number, engine.outbox.popleft(), 0.0)
            for send in sends:
                self.engines[int(send.to)].pending.append(send.message)

    def step(self, engine):
        """Let an engine wait for its oldest step if all have started it, else take a turn of its loop."""
        if not engine.waits:
            engine.turn()
            return
        index = engine.collected
        if any(len(other.started) <= index for other in self.engines):
            return
        told = [other.started[index] for other in self.engines]
        assert len({answer is None for answer in told}) == 1, "one asks while another does not"
        engine.collect(None if told[0] is None else any(told))

    def restart_coordinator(self):
        self.coordinator = Coordinator(0.0)
        for engine in self.engines:
            engine.outbox.clear()
            engine.pending.clear()


@settings(max_examples=300, deadline=None)
@given(data=st.data(), count=st.integers(1, 4), depth=st.integers(1, 3))
def test_whatever_happens_in_whatever_order_nobody_hangs(data, count, depth):
    group = Group(count, depth)
    for engine in group.engines:
        engine.pending = deque()
    kinds = ["turn"] * 40 + ["send"] * 20 + ["take"] * 20 + ["request"] * 3 + ["abort", "register", "restart"]
    # Drawn one by one, Hypothesis makes few and short ones.
    random = data.draw(st.randoms(use_true_random=False))
    for _ in range(data.draw(st.integers(0, 400))):
        kind, number, steps = random.choice(kinds), random.randrange(count), random.randint(1, 9)
        engine = group.engines[number]
        if kind == "turn":
            group.step(engine)
        elif kind == "send":
            group.send(engine)
        elif kind == "take" and engine.pending:
            engine.inbox.append(engine.pending.popleft())
        elif kind == "request":
            engine.requests.append(steps)
        elif kind == "abort":
            engine.requests.clear()
        elif kind == "register" and not engine.waits:
            engine.register()
        elif kind == "restart":
            group.restart_coordinator()
    # From here on nothing more happens to them, but each link registers every second.
    for second in range(60):
        for engine in group.engines:
            if not engine.waits and second % 10 == 0:
                engine.register()
        for _ in range(30):
            for engine in group.engines:
                group.send(engine)
                if engine.pending:
                    engine.inbox.append(engine.pending.popleft())
                group.step(engine)
    assert [engine.requests for engine in group.engines] == [[]] * count
    assert not any(engine.steps.running or engine.waits for engine in group.engines)
    assert len({engine.steps.ended for engine in group.engines}) == 1
    assert len({len(engine.started) for engine in group.engines}) == 1
