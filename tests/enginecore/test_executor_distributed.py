"""What an executor makes of what its workers say, with workers that are played."""

import os
from pathlib import Path

import pytest

from collectives.ring import RingReader
from enginecore.config import make_config
from enginecore.errors import ConfigError, EngineDeadError, ModelError, WorkerDied
from enginecore.executor.distributed import DistributedExecutor, Ending
from enginecore.executor.step import StepInput, StepOutput
from enginecore.executor.wire import Failure, Loaded, Progress, StepDone, decode_step
from enginecore.model_files import ModelFiles
from steps import decode_only, ids

LOADED = Loaded(10, 2, 64, 100, 320, on_cpu=True)


class PlayedWorker:
    """A worker that says what a test tells it to."""

    def __init__(self, settings):
        self.settings = settings
        self.rank = settings.rank
        self.pid = 1000 + settings.rank
        self.ended = self.released = False
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

    def receive(self):
        os.read(self._readable, 100)
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

    def __init__(self, ranks, *opening, **options):
        """`opening` is what each rank says and whether it ends then."""
        self.workers = []

        def launch(settings):
            self.workers += [PlayedWorker(each) for each in settings]
            for worker, (said, end) in zip(self.workers, opening, strict=True):
                worker.say(*said, end=end)
            return self.workers

        config = make_config({"model": "m", "device": "cpu", "tensor_parallel_size": ranks, **options})
        self.executor = DistributedExecutor(config, ModelFiles("m", tmp, {}), launch)


tmp = Path("never-read")


READY = ([Progress("weights loaded"), LOADED], False)


def failed(kind, message, at):
    return Failure(kind, message, f"Traceback of {message}", at)


def test_facts_come_from_the_workers():
    executor = Stage(2, READY, READY).executor
    facts = (executor.num_blocks, executor.host_blocks, executor.window, executor.max_model_len)
    assert facts == (10, 2, 64, 100)
    assert (executor.vocab_size, executor.depth) == (320, 1)
    assert Stage(2, READY, READY, async_scheduling=True).executor.depth == 2


def test_ranks_and_settings():
    settings = [worker.settings for worker in Stage(4, *[READY] * 4).workers]
    assert [(s.rank, s.local_rank, s.local_size, s.tp, s.pp) for s in settings] == [
        (rank, rank, 4, 4, 1) for rank in range(4)
    ]
    assert len({s.rendezvous for s in settings}) == len({s.steps for s in settings}) == 1


def test_a_step_reaches_every_rank_and_results_come_back():
    stage = Stage(2, READY, READY)
    readers = [RingReader(worker.settings.steps, worker.rank) for worker in stage.workers]
    stage.executor.submit(decode_only(3))
    for reader in readers:
        step = decode_step(reader.read(timeout=5))
        assert isinstance(step, StepInput)
        assert step.rows.tolist() == [0, 1, 2]
    stage.workers[0].say(StepDone(StepOutput(7, ids(4), {}, [])))
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
