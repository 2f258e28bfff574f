"""Several workers that run every step together, each in a process of its own, on one host or several.

A step reaches the workers of this host through a ring in shared memory and others over their links; the
results of one rank are enough. A worker that ends takes the executor with it: the others wait for it in the
middle of a step.
"""

import logging
import selectors
import time
import weakref
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, NoReturn, Protocol

import msgspec
import numpy as np

from collectives.ring import RingBroadcast, RingError
from enginecore import logs
from enginecore.config import EngineConfig
from enginecore.data_parallel.meeting import Meeting
from enginecore.data_parallel.messages import ALONE, RankPlace
from enginecore.errors import ConfigError, EngineDeadError, ModelError, OctavoError, WorkerDied
from enginecore.executor.executor import OnLoaded, OnPhase, depth
from enginecore.executor.link import CoreEnd, LinkError
from enginecore.executor.messages import (
    CountExperts,
    Failure,
    Listening,
    Loaded,
    Progress,
    StepDone,
    WorkerMessage,
    WorkerSettings,
    encode_step,
)
from enginecore.executor.step import StepInput, StepOutput
from enginecore.forks import MadeHere
from enginecore.messages import EngineLimits, ExpertLoads
from enginecore.model_files import ModelFiles

logger = logging.getLogger(__name__)

_RING_BYTES = 16 << 20
"""Some hundred steps in which rows only decode, or a step with millions of prompt tokens."""
_TO_END = 3.0
"""Seconds that workers have to end by themselves."""
_GRACE = 0.3
"""Seconds in which the cause of a failure may still show."""
_MENDABLE = {error.__name__: error for error in (ConfigError, ModelError)}


class RankLocation(NamedTuple):
    """The host that a rank runs on."""

    host: str
    """Its address, at which the other ranks reach it."""
    local_rank: int
    """Index among the ranks of the host that see the same devices."""
    local_size: int
    """Ranks on the host."""
    on_core_host: bool = True
    """Whether the ring can bring the steps."""


class Ending(NamedTuple):
    """The end of a worker."""

    how: str
    """Such as "was killed by signal 9 (Killed)"."""
    last_lines: list[str]
    """Of its standard error."""


class WorkerHandle(Protocol):
    """A started worker."""

    rank: int
    pid: int
    location: RankLocation
    link: CoreEnd

    def ending(self) -> Ending:
        """Return how it ended; it has, or is about to."""
        ...

    def release(self) -> None:
        """Let it know that it is not needed any more."""
        ...

    def end(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for its end, then force it."""
        ...


class DistributedExecutor:
    """Runs steps on all ranks of a grid."""

    def __init__(
        self,
        workers: Sequence[WorkerHandle],
        config: EngineConfig,
        files: ModelFiles,
        *,
        place: RankPlace = ALONE,
        meeting: Meeting | None = None,
        rendezvous: str = "",
        on_loaded: OnLoaded | None = None,
        on_phase: OnPhase = lambda phase: None,
    ) -> None:
        """Bring up the workers, one for each rank in order, and return when all are ready.

        Where engines share experts, `rendezvous` is where the first worker of the first engine listens for
        all others. The first engine has none, and tells it to `meeting`.

        Raises:
            ConfigError, ModelError: a worker refused to start; the message is its own, with its rank.
            WorkerDied: a worker ended.
        """
        self._workers = workers
        self._on_loaded = on_loaded
        self._on_phase = on_phase
        self._place = place
        self._all_ranks = config.data_parallel_size * len(workers)
        self._timeout = config.distributed_timeout_seconds
        self._selector = selectors.DefaultSelector()
        self._ring: RingBroadcast | None = None
        self._meeting = meeting
        self._rendezvous = rendezvous
        self._loaded: dict[int, EngineLimits] = {}
        self._failures: dict[int, Failure] = {}
        self._outputs: deque[StepOutput] = deque()
        self._loads: dict[int, ExpertLoads] = {}
        self._error: OctavoError | None = None
        try:
            self._start(config, files)
        except BaseException:
            self.shutdown()
            raise
        # An executor that is dropped, or left to the end of the program, ends its workers too.
        weakref.finalize(self, _end_if_ours, MadeHere(), self._workers, self._ring)
        self.limits = self._loaded[0]
        self.depth = depth(config, self.limits)

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of which one becomes readable when a worker sends a message or ends."""
        return [worker.link.fileno() for worker in self._workers if not worker.link.ended]

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, by rank."""
        return [worker.pid for worker in self._workers]

    @property
    def local_pids(self) -> list[int]:
        """Process ids of those on this host."""
        return [worker.pid for worker in self._workers if worker.location.on_core_host]

    def check(self) -> None:
        """Raise WorkerDied if a worker has ended."""
        self._listen(0)

    def submit(self, step: StepInput) -> None:
        """Hand a step to the workers."""
        self._broadcast(encode_step(step))

    def collect(self) -> StepOutput:
        """Wait for the oldest step under way and return its results."""
        while not self._outputs:
            self._listen(None)
        return self._outputs.popleft()

    def expert_loads(self) -> np.ndarray | None:
        """Ask the workers, and wait until they have done the steps submitted before."""
        self._loads = {}
        self._broadcast(encode_step(CountExperts()))
        while len(self._loads) < len(self._workers):
            self._listen(None)
        counted = [loads.tokens for loads in self._loads.values() if loads.tokens is not None]
        return np.sum(counted, axis=0) if counted else None

    def shutdown(self) -> None:
        """End the workers, by force those that do not go by themselves."""
        if self._error is None:
            self._error = EngineDeadError("the workers were shut down")
        self._selector.close()
        _end(self._workers, self._ring, _TO_END)

    def _start(self, config: EngineConfig, files: ModelFiles) -> None:
        """Send settings, first to rank 0, which reports where it listens; wait until all have loaded."""
        readers = [worker.rank for worker in self._workers if worker.location.on_core_host]
        self._ring = RingBroadcast(len(readers), _RING_BYTES) if readers else None
        for worker in self._workers:
            self._selector.register(worker.link, selectors.EVENT_READ, worker)
        while not all(worker.link.connected for worker in self._workers):
            self._await_start()
        others = list(self._workers)
        # With the path where the model was found, so that no worker looks for it again and finds another.
        config = replace(config, model=str(files.path), revision=None)
        if not self._rendezvous:
            self._send_settings(others.pop(0), config, readers)
        while not self._rendezvous:
            self._await_start()
        for worker in others:
            self._send_settings(worker, config, readers)
        while len(self._loaded) < len(self._workers):
            self._await_start()

    def _await_start(self) -> None:
        """Handle messages of workers while they start, and keep other engines told where to meet."""
        if self._meeting is None:
            return self._listen(None)
        self._listen(self._meeting.due())
        return self._meeting.tell(self._rendezvous)

    def _send_settings(self, worker: WorkerHandle, config: EngineConfig, readers: Sequence[int]) -> None:
        location = worker.location
        near = location.on_core_host and self._ring is not None
        settings = WorkerSettings(
            config=config,
            rank=worker.rank,
            tp=config.tensor_parallel_size,
            pp=config.pipeline_parallel_size,
            host=location.host,
            local_rank=location.local_rank,
            local_size=location.local_size,
            rendezvous=self._rendezvous,
            ring=self._ring.address if near else None,
            reader=readers.index(worker.rank) if near else 0,
            place=self._place,
            log=logs.current(),
        )
        with self._delivery():
            worker.link.send(msgspec.json.encode(settings))

    def _broadcast(self, step: bytes) -> None:
        """Send a step, whole and in order, to every worker."""
        if self._error is not None:
            raise self._error
        with self._delivery():
            for worker in self._workers:
                if not worker.location.on_core_host:
                    worker.link.send(step)
            if self._ring is not None:
                self._ring.write(step, self._timeout)

    @contextmanager
    def _delivery(self) -> Generator[None]:
        """Fail with the end of a worker, if that is why something does not reach it."""
        try:
            yield
        except (LinkError, RingError) as error:
            self._listen(1.0)
            self._fail(EngineDeadError(f"a worker takes nothing: {error}"))

    def _listen(self, timeout: float | None) -> None:
        """Handle messages of workers, waiting up to `timeout` seconds for one; None waits for ever."""
        if self._error is not None:
            raise self._error
        self._take(timeout)
        if self._failures or any(worker.link.ended for worker in self._workers):
            self._await_cause()
            self._fail(self._first_failure())

    def _await_cause(self) -> None:
        """Wait a little for an end without a failure: failures that it causes may be heard before it."""
        until = time.monotonic() + _GRACE
        while not self._silent() and self._selector.get_map() and (left := until - time.monotonic()) > 0:
            self._take(left)

    def _silent(self) -> list[WorkerHandle]:
        """Workers that ended without sending a failure."""
        return [worker for worker in self._workers if worker.link.ended and worker.rank not in self._failures]

    def _take(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            worker: WorkerHandle = key.data
            for message in worker.link.receive():
                self._handle(worker, message)
            if worker.link.ended:
                self._selector.unregister(worker.link)

    def _handle(self, worker: WorkerHandle, message: WorkerMessage) -> None:
        match message:
            case StepDone(output=output):
                self._outputs.append(output)
            case ExpertLoads():
                self._loads[worker.rank] = message
            case Progress(text=text):
                logger.info("%s: %s", self._name(worker), text)
                if worker.rank == 0:
                    self._on_phase(text)
            case Loaded(done=done, total=total):
                if self._on_loaded is not None:
                    self._on_loaded(done, total)
            case Listening(rendezvous=rendezvous):
                self._rendezvous = rendezvous
            case EngineLimits():
                self._loaded[worker.rank] = message
            case Failure():
                self._failures[worker.rank] = message

    def _first_failure(self) -> OctavoError:
        """Return the cause: an end without a failure, as no other rank causes that, or the first failure."""
        if silent := self._silent():
            return self._died(silent[0])
        rank, failure = min(self._failures.items(), key=lambda item: item[1].at)
        if failure.kind in _MENDABLE and len(self._loaded) < len(self._workers):
            return _MENDABLE[failure.kind](f"rank {self._number(rank)}: {failure.message}")
        worker = self._workers[rank]
        return WorkerDied(
            f"{self._name(worker)} (process {worker.pid}) failed: "
            f"{failure.kind}: {_one_line([failure.message])}",
            rank=self._number(rank),
            pid=worker.pid,
            details=failure.traceback,
        )

    def _died(self, worker: WorkerHandle) -> WorkerDied:
        ending = worker.ending()
        said = _one_line(ending.last_lines[-3:])
        return WorkerDied(
            f"{self._name(worker)} (process {worker.pid}) {ending.how}"
            + (f"; the last it wrote: {said}" if said else ""),
            rank=self._number(worker.rank),
            pid=worker.pid,
            details="\n".join(ending.last_lines),
        )

    def _number(self, rank: int) -> int:
        """Return the rank among those of all engines that share the requests."""
        return self._place.rank * len(self._workers) + rank

    def _name(self, worker: WorkerHandle) -> str:
        return f"rank {self._number(worker.rank)} of {self._all_ranks}"

    def _fail(self, error: OctavoError) -> NoReturn:
        if self._error is not None:
            raise self._error
        self._error = error
        _end(self._workers, self._ring, 0)
        if isinstance(error, WorkerDied):
            logger.error("%s\n%s", error, error.details)
        raise error


def _end_if_ours(made_here: MadeHere, workers: Sequence[WorkerHandle], ring: RingBroadcast | None) -> None:
    # A fork drops its copy too, at its own end.
    if made_here:
        _end(workers, ring, _TO_END)


def _end(workers: Sequence[WorkerHandle], ring: RingBroadcast | None, timeout: float) -> None:
    for worker in workers:
        worker.release()
    until = time.monotonic() + timeout
    for worker in workers:
        worker.end(max(0.0, until - time.monotonic()))
    if ring is not None:
        ring.close()


def _one_line(lines: Sequence[str]) -> str:
    text = " ".join(" / ".join(lines).split())
    return text if len(text) <= 400 else text[:397] + "..."
