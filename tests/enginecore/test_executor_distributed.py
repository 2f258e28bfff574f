"""An executor over several workers that are played: settings, steps, failures, ends."""

import os
from pathlib import Path

import msgspec
import pytest

from collectives.ring import RingReader
from enginecore.config import make_config
from enginecore.data_parallel.messages import ALONE, RankPlace
from enginecore.errors import ConfigError, EngineDeadError, ModelError, WorkerDied
from enginecore.executor.distributed import DistributedExecutor, Ending, RankLocation
from enginecore.executor.messages import (
    Failure,
    Listening,
    Progress,
    StepDone,
    WorkerSettings,
    decode_step,
)
from enginecore.executor.processes import start_processes
from enginecore.executor.step import StepInput, StepOutput
from enginecore.messages import EngineLimits
from enginecore.model_files import ModelFiles
from steps import decode_only, ids

LOADED = EngineLimits(100, 320, 10, 16, host_blocks=2, window=64, device="cpu")


class PlayedWorker:
    """A worker that says what a test tells it to."""

    def __init__(self, rank, location):
        self.rank = rank
        self.pid = 1000 + rank
        self.location = location
        self.link = self
        self.settings = None
        self.sent = []
        self.connected = self.ended = self.released = False
        self.limit = None
        self.when_heard = lambda: None
        self._said = []
        self._ends = False
        self._readable, self._writable = os.pipe()

    def say(self, *messages, end=False):
        self._said += messages
        self._ends = end
        os.write(self._writable, b".")

    def fileno(self):
        return self._readable

    def send(self, data):
        if self.settings is None:
            self.settings = msgspec.json.decode(data, type=WorkerSettings)
            if self.rank == 0:
                self.say(Listening("10.0.0.7:29500"))
        else:
            self.sent.append(data)

    def receive(self):
        os.read(self._readable, 100)
        self.connected = True
        said, self._said = self._said, []
        self.ended = self._ends
        self.when_heard()
        return said

    def ending(self):
        return Ending("was killed by signal 9 (Killed)", ["one", "two", "three", "four"])

    def release(self):
        self.released = True

    def end(self, timeout):
        self.limit = timeout


class Stage:
    """An executor over played workers."""

    def __init__(self, ranks, *opening, locations=None, place=ALONE, **options):
        """`opening` is what each rank says and whether it ends then."""
        locations = locations or [RankLocation("127.0.0.1", rank, ranks) for rank in range(ranks)]
        self.workers = [PlayedWorker(rank, location) for rank, location in enumerate(locations)]
        for worker, (said, end) in zip(self.workers, opening, strict=True):
            worker.say(*said, end=end)
        config = make_config({"model": "m", "device": "cpu", "tensor_parallel_size": ranks, **options})
        self.executor = DistributedExecutor(self.workers, config, ModelFiles("m", tmp, {}), place=place)


tmp = Path("never-read")


READY = ([Progress("weights loaded"), LOADED], False)


def failed(kind, message, at):
    return Failure(kind, message, f"Traceback of {message}", at)


def test_facts_come_from_the_workers():
    executor = Stage(2, READY, READY).executor
    assert (executor.limits, executor.depth) == (LOADED, 1)
    assert Stage(2, READY, READY, async_scheduling=True).executor.depth == 2


def test_ranks_and_settings():
    settings = [worker.settings for worker in Stage(4, *[READY] * 4).workers]
    assert [(s.rank, s.local_rank, s.local_size, s.tp, s.pp) for s in settings] == [
        (rank, rank, 4, 4, 1) for rank in range(4)
    ]
    assert len({s.ring for s in settings}) == 1
    # Rank 0 is to listen, the others are told where.
    assert [s.rendezvous for s in settings] == ["", *["10.0.0.7:29500"] * 3]
    assert {s.host for s in settings} == {"127.0.0.1"}


def test_engines_of_one_host_divide_it():
    """The second of two engines of two ranks each: the third and fourth of the host's devices are its own."""
    config = make_config({"model": "m", "device": "cpu", "tensor_parallel_size": 2, "data_parallel_size": 2})
    place = RankPlace(rank=1, local_index=1, local_count=2, incarnation=3)
    started = start_processes(config, place)
    try:
        assert [worker.location for worker in started] == [
            RankLocation("127.0.0.1", 2, 4),
            RankLocation("127.0.0.1", 3, 4),
        ]
        assert [worker.rank for worker in started] == [0, 1]
    finally:
        for worker in started:
            worker.release()
            worker.end(0)


def test_a_worker_is_named_by_its_number_among_those_of_all_engines():
    place = RankPlace(rank=1, local_count=2)
    stage = Stage(2, READY, READY, place=place, data_parallel_size=3)
    assert {worker.settings.place for worker in stage.workers} == {place}
    stage.workers[1].say(end=True)
    with pytest.raises(WorkerDied, match=r"^rank 3 of 6 \(process \d+\) was killed") as caught:
        stage.executor.check()
    assert caught.value.rank == 3


def test_ranks_on_two_hosts_are_told_where_steps_come_from():
    """Rank 0 is on another host, the others are on the core's."""
    locations = [
        RankLocation("10.0.0.7", 0, 1, on_core_host=False),
        RankLocation("10.0.0.1", 0, 2),
        RankLocation("10.0.0.1", 1, 2),
    ]
    stage = Stage(3, READY, READY, READY, locations=locations)
    far, *near = (worker.settings for worker in stage.workers)
    assert (far.host, far.ring) == ("10.0.0.7", None)
    assert all(settings.ring for settings in near)
    assert [(s.reader, s.local_rank, s.local_size) for s in near] == [(0, 0, 2), (1, 1, 2)]
    readers = [RingReader(settings.ring, settings.reader) for settings in near]
    stage.executor.submit(decode_only(3))
    [sent] = stage.workers[0].sent
    assert [reader.read(timeout=5) for reader in readers] == [sent, sent]
    assert decode_step(sent).plan.rows.tolist() == [0, 1, 2]


def test_a_step_reaches_every_rank_and_results_come_back():
    stage = Stage(2, READY, READY)
    readers = [RingReader(worker.settings.ring, worker.rank) for worker in stage.workers]
    stage.executor.submit(decode_only(3))
    for reader in readers:
        step = decode_step(reader.read(timeout=5))
        assert isinstance(step, StepInput)
        assert step.plan.rows.tolist() == [0, 1, 2]
    stage.workers[0].say(StepDone(StepOutput(7, ids(4), {}, {})))
    assert stage.executor.collect().tokens.tolist() == [4]


@pytest.mark.parametrize(("kind", "error"), [("ConfigError", ConfigError), ("ModelError", ModelError)])
def test_a_refusal_to_start_has_its_rank(kind, error):
    opening = ([failed(kind, "3 heads", 5)], True)
    with pytest.raises(error, match=r"^rank 1: 3 heads$"):
        Stage(2, READY, opening)


def test_the_first_failure_is_the_one_reported():
    stage = Stage(3, READY, READY, READY)
    stage.workers[0].say(failed("RuntimeError", "connection closed by peer", 20), end=True)
    stage.workers[2].say(failed("IndexError", "boom", 10), end=True)
    with pytest.raises(
        WorkerDied, match=r"^rank 2 of 3 \(process 1002\) failed: IndexError: boom$"
    ) as caught:
        stage.executor.collect()
    assert (caught.value.rank, caught.value.pid) == (2, 1002)
    assert caught.value.details == "Traceback of boom"
    assert all(worker.released and worker.limit == 0 for worker in stage.workers)
    for call in (stage.executor.collect, stage.executor.check, lambda: stage.executor.submit(decode_only(1))):
        with pytest.raises(WorkerDied, match="boom"):
            call()


def test_a_silent_end_comes_before_what_it_made_fail():
    """Even when it is heard only after that."""
    stage = Stage(3, READY, READY, READY)
    stage.workers[0].say(failed("RuntimeError", "connection closed by peer", 20), end=True)
    stage.workers[0].when_heard = lambda: stage.workers[1].say(end=True)
    message = r"rank 1 of 3 \(process 1001\) was killed by signal 9 \(Killed\); .*: two / three / four$"
    with pytest.raises(WorkerDied, match=message):
        stage.executor.check()


def test_an_end_while_starting():
    with pytest.raises(WorkerDied, match="rank 0 of 2"):
        Stage(2, ([], True), READY)


def test_shutdown_lets_workers_end_by_themselves():
    stage = Stage(2, READY, READY)
    stage.executor.shutdown()
    assert all(worker.released and worker.limit > 1 for worker in stage.workers)
    with pytest.raises(EngineDeadError, match="shut down"):
        stage.executor.submit(decode_only(1))
    stage.executor.shutdown()


def test_dropping_it_ends_the_workers():
    stage = Stage(2, READY, READY)
    del stage.executor
    assert all(worker.released for worker in stage.workers)
