"""Several workers that run every step together, each in a process of its own.

How workers are started is left to a `Launch`, and where to a `Placement`; how they are spoken to is here.
Steps go to all of them at once, see `executor.steps`; each answers on a descriptor of its own, and of the
results of a step one rank's are enough. A worker that ends takes the executor with it: the others wait for
it in the middle of a step.
"""

import logging
import selectors
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, NoReturn, Protocol

import numpy as np

from collectives import Grid
from enginecore.config import EngineConfig
from enginecore.errors import ConfigError, EngineDeadError, ModelError, OctavoError, WorkerDied
from enginecore.executor.executor import depth
from enginecore.executor.placement import Placement, on_this_host
from enginecore.executor.step import StepInput, StepOutput
from enginecore.executor.steps import StepsStuck, StepWriter
from enginecore.executor.wire import (
    ExpertLoads,
    Failure,
    Loaded,
    Progress,
    ReportExpertLoads,
    StepDone,
    WorkerMessage,
    WorkerSettings,
    encode_step,
)
from enginecore.model_files import ModelFiles

logger = logging.getLogger(__name__)

_TO_END = 3.0
"""Seconds that workers have to end by themselves."""
_GRACE = 0.3
"""Seconds in which the cause of a failure may still show."""
_MENDABLE = {error.__name__: error for error in (ConfigError, ModelError)}


class Ending(NamedTuple):
    """How a worker ended."""

    how: str
    """Such as "was killed by signal 9 (Killed)"."""
    last_lines: list[str]
    """Of its standard error."""


class WorkerHandle(Protocol):
    """A worker, as the one that started it holds it."""

    rank: int
    pid: int
    ended: bool
    """Whether `receive` has met the end of what it says."""

    def fileno(self) -> int:
        """A descriptor that is readable when there is something to receive, also the end."""
        ...

    def receive(self) -> list[WorkerMessage]:
        """Return what it has said since the last call, without waiting."""
        ...

    def ending(self) -> Ending:
        """Say how it ended; it has, or is about to."""
        ...

    def release(self) -> None:
        """Let it know that nobody needs it any more."""
        ...

    def end(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for its end, then force it."""
        ...


Launch = Callable[[Sequence[WorkerSettings]], Sequence[WorkerHandle]]
"""Starts a worker for each of the settings, and waits for none."""


class DistributedExecutor:
    """Runs steps on all ranks of a grid."""

    def __init__(
        self, config: EngineConfig, files: ModelFiles, launch: Launch, placement: Placement | None = None
    ) -> None:
        """Start the workers and return when all are ready; without a `placement`, on this host.

        Raises:
            ConfigError: there are more stages than layers.
            ConfigError, ModelError: a worker refused to start; the message is its own, with its rank.
            WorkerDied: a worker ended.
        """
        self._grid = Grid(pp=config.pipeline_parallel_size, tp=config.tensor_parallel_size)
        self._timeout = config.distributed_timeout_seconds
        self._placement = placement or on_this_host(self._grid.size)
        seats = self._placement.seats
        self._steps = StepWriter(
            sum(seat.near for seat in seats),
            [seat.link for seat in seats if seat.link is not None and not seat.near],
            self._timeout,
        )
        self._selector = selectors.DefaultSelector()
        self._loaded: dict[int, Loaded] = {}
        self._failures: dict[int, Failure] = {}
        self._outputs: deque[StepOutput] = deque()
        self._loads: ExpertLoads | None = None
        self._error: OctavoError | None = None
        self._workers: Sequence[WorkerHandle] = ()
        try:
            self._workers = launch(self._settings(config, files))
            for worker in self._workers:
                self._selector.register(worker, selectors.EVENT_READ)
            while len(self._loaded) < self._grid.size:
                self._listen(None)
        except BaseException:
            self.shutdown()
            raise
        # An executor that is dropped, or left to the end of the program, ends its workers too.
        weakref.finalize(self, _end, self._workers, self._steps, _TO_END)
        facts = self._loaded[0]
        self.num_blocks = facts.num_blocks
        self.host_blocks = facts.host_blocks
        self.window = facts.window
        self.max_model_len = facts.max_model_len
        self.vocab_size = facts.vocab_size
        self.depth = depth(config, on_cpu=facts.on_cpu)

    @property
    def descriptors(self) -> list[int]:
        """What becomes readable when a worker says something or ends."""
        return [worker.fileno() for worker in self._workers if not worker.ended]

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, by rank."""
        return [worker.pid for worker in self._workers]

    def check(self) -> None:
        """Raise WorkerDied if a worker has ended."""
        self._listen(0)

    def submit(self, step: StepInput) -> None:
        """Hand a step to the workers."""
        self._write(step)

    def collect(self) -> StepOutput:
        """Wait for the oldest step under way and return its results."""
        while not self._outputs:
            self._listen(None)
        return self._outputs.popleft()

    def expert_loads(self) -> np.ndarray | None:
        """Ask the workers, and wait until they have done the steps submitted before."""
        self._loads = None
        self._write(ReportExpertLoads())
        while self._loads is None:
            self._listen(None)
        layers = self._loads.layers
        return None if layers is None else np.array(layers, np.int64)

    def shutdown(self) -> None:
        """End the workers, by force those that do not go by themselves."""
        if self._error is None:
            self._error = EngineDeadError("the workers were shut down")
        self._selector.close()
        _end(self._workers, self._steps, _TO_END)

    def _settings(self, config: EngineConfig, files: ModelFiles) -> list[WorkerSettings]:
        return [
            WorkerSettings(
                # Where the model was found, so that no worker looks for it again and finds another.
                config=replace(config, model=str(files.path), revision=None),
                rank=rank,
                tp=self._grid.tp,
                pp=self._grid.pp,
                local_rank=seat.local_rank,
                local_size=seat.local_size,
                rendezvous=self._placement.rendezvous,
                steps=self._steps.ring if seat.near else None,
                reader=sum(other.near for other in self._placement.seats[:rank]),
                link=None if seat.link is None else seat.link.settings,
            )
            for rank, seat in enumerate(self._placement.seats)
        ]

    def _write(self, step: StepInput | ReportExpertLoads) -> None:
        if self._error is not None:
            raise self._error
        try:
            self._steps.write(encode_step(step))
        except StepsStuck as error:
            self._listen(1.0)
            self._fail(EngineDeadError(f"the workers take no steps: {error}"))

    def _listen(self, timeout: float | None) -> None:
        """Take in what workers say, waiting up to `timeout` seconds for something; None waits for ever."""
        if self._error is not None:
            raise self._error
        self._take(timeout)
        if self._failures or any(worker.ended for worker in self._workers):
            self._await_cause()
            self._fail(self._first_failure())

    def _await_cause(self) -> None:
        """Wait a little for an end without a word: what others make of it may be heard before it is."""
        until = time.monotonic() + _GRACE
        while not self._silent() and self._selector.get_map() and (left := until - time.monotonic()) > 0:
            self._take(left)

    def _silent(self) -> list[WorkerHandle]:
        """Workers that ended without a word."""
        return [worker for worker in self._workers if worker.ended and worker.rank not in self._failures]

    def _take(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            worker: WorkerHandle = key.fileobj  # ty: ignore[invalid-assignment]
            for message in worker.receive():
                self._handle(worker, message)
            if worker.ended:
                self._selector.unregister(worker)

    def _handle(self, worker: WorkerHandle, message: WorkerMessage) -> None:
        match message:
            case StepDone(output=output):
                self._outputs.append(output)
            case ExpertLoads():
                self._loads = message
            case Progress(text=text):
                logger.info("rank %d of %d: %s", worker.rank, self._grid.size, text)
            case Loaded():
                self._loaded[worker.rank] = message
            case Failure():
                self._failures[worker.rank] = message

    def _first_failure(self) -> OctavoError:
        """What went wrong first: an end without a word, as nothing that others do brings that about."""
        if silent := self._silent():
            return self._died(silent[0])
        rank, failure = min(self._failures.items(), key=lambda item: item[1].at)
        if failure.kind in _MENDABLE and len(self._loaded) < self._grid.size:
            return _MENDABLE[failure.kind](f"rank {rank}: {failure.message}")
        worker = self._workers[rank]
        return WorkerDied(
            f"rank {rank} of {self._grid.size} (process {worker.pid}) failed: "
            f"{failure.kind}: {_one_line([failure.message])}",
            rank=rank,
            pid=worker.pid,
            details=failure.traceback,
        )

    def _died(self, worker: WorkerHandle) -> WorkerDied:
        ending = worker.ending()
        said = _one_line(ending.last_lines[-3:])
        return WorkerDied(
            f"rank {worker.rank} of {self._grid.size} (process {worker.pid}) {ending.how}"
            + (f"; the last it wrote: {said}" if said else ""),
            rank=worker.rank,
            pid=worker.pid,
            details="\n".join(ending.last_lines),
        )

    def _fail(self, error: OctavoError) -> NoReturn:
        if self._error is not None:
            raise self._error
        self._error = error
        _end(self._workers, self._steps, 0)
        if isinstance(error, WorkerDied):
            logger.error("%s\n%s", error, error.details)
        raise error


def _end(workers: Sequence[WorkerHandle], steps: StepWriter, timeout: float) -> None:
    for worker in workers:
        worker.release()
    until = time.monotonic() + timeout
    for worker in workers:
        worker.end(max(0.0, until - time.monotonic()))
    steps.close()


def _one_line(lines: Sequence[str]) -> str:
    text = " ".join(" / ".join(lines).split())
    return text if len(text) <= 400 else text[:397] + "..."
