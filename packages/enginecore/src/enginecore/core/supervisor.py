"""The supervisor of ranks: starts core processes, watches them, and starts them again.

It runs in a thread of the process that made it, and tells that of each rank's ups and downs. Needs no torch.
"""

import logging
import math
import os
import selectors
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import msgspec

from enginecore import logs
from enginecore.config import EngineConfig
from enginecore.core.board import Board, Progress
from enginecore.core.coordinator_child import CoordinatorChild
from enginecore.core.identity import split_handle
from enginecore.core.rank_process import RankProcess
from enginecore.core.settings import CoreSettings
from enginecore.data_parallel.connection import read_key, tcp_address
from enginecore.data_parallel.messages import CoordinatorAddress, RankPlace
from enginecore.messages import EngineLimits, RankDown, RankEvent, RankLoading, RankOut, RankUp
from enginecore.private_folder import private_folder

logger = logging.getLogger(__name__)

_STEPS_THAT_PROVE_A_START = 100
"""A rank that dies after so many did not die of its start."""
_WINDOW = 300.0
"""Seconds in which `max_rank_restarts` early deaths are borne."""
_SCHEDULING_WINDOW = 60.0
"""Seconds in which the scheduler, or its policy, may fail once."""
_LEAST_STEP_TIMEOUT, _FIRST_STEP_TIMEOUT = 60.0, 600.0
_TIMES_AS_LONG = 10
"""As any step that was seen, for as many tokens, may a step take before its core counts as hung."""
_SECONDS_BETWEEN_LOOKS = 1.0
_SPARE_STEPS = 2
"""Steps that a core has under way at most, beside one for each stage of a pipeline."""


class _Rank:
    """One rank over all its starts."""

    def __init__(self, place: RankPlace, board: Path) -> None:
        self.place = place
        self.board = board
        self.process: RankProcess | None = None
        """None once the rank is out."""
        self.limits: EngineLimits | None = None
        """Of its first start: they hold for all that follow."""
        self.is_up = False
        self.early_deaths: deque[float] = deque()
        self.scheduling_failed = -math.inf
        """When its last death was one by an error of the scheduler or its policy, on the monotonic clock."""

    def note_death(self, early: bool) -> int:
        """Return how many early deaths there have been of late, this one included."""
        now = time.monotonic()
        if early:
            self.early_deaths.append(now)
        while self.early_deaths and self.early_deaths[0] < now - _WINDOW:
            self.early_deaths.popleft()
        return len(self.early_deaths)


class RankSupervisor:
    """Keeps the ranks of one server, or of one engine in a program, alive."""

    def __init__(self, config: EngineConfig) -> None:
        """Start all ranks that `config` gives to this host, without waiting for them."""
        self._config = config
        self.folder = private_folder()
        """Private, and removed at the end."""
        self._listener: Callable[[RankEvent], None] | None = None
        self._untold: list[RankEvent] = []
        self._telling = threading.Lock()
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self.coordinator = _coordinator_address(config, self.folder)
        """Where ranks report their loads; None with one rank."""
        self._coordinator: CoordinatorChild | None = None
        """The coordinator, where it is not that of several servers."""
        if self.coordinator is not None and config.coordinator is None:
            logger.info("coordinator at %s", self.coordinator.reports)
            self._start_coordinator(self.coordinator)
        self._placements = [_kept_placement(config, self.folder)]
        """Files with the placement of experts, the one in use last; None for an even one."""
        self._reload = False
        ranks = config.local_ranks
        self._ranks = [
            _Rank(RankPlace(rank, index, len(ranks)), self.folder / f"board-{rank}")
            for index, rank in enumerate(ranks)
        ]
        self.boards = {state.place.rank: state.board for state in self._ranks}
        """Path of each rank's board, which outlives its processes."""
        for state in self._ranks:
            self._start(state)
        self._thread = threading.Thread(target=self._run, daemon=True, name="rank-supervisor")
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the running cores, by rank."""
        return [state.process.pid for state in self._ranks if state.process is not None]

    def listen(self, listener: Callable[[RankEvent], None]) -> None:
        """Call `listener`, from another thread, with each event, those so far included. To be called once."""
        with self._telling:
            self._listener = listener
            for event in self._untold:
                listener(event)
            self._untold.clear()

    def reload_experts(self) -> None:
        """Read the file of the option expert_placement again, and start all ranks again with what it says.

        Their requests go on. A placement with which the ranks do not start is given up for the one before.
        """
        self._reload = True
        os.write(self._wake, b"r")

    def stop(self) -> None:
        """End all ranks, and wait for that."""
        self._stopping = True
        os.write(self._wake, b"x")
        self._thread.join()
        processes = [state.process for state in self._ranks if state.process is not None]
        for process in processes:
            process.release()
        for process in processes:
            process.stop()
        if self._coordinator is not None:
            self._coordinator.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._stopping:
            for key, _ in self._selector.select(self._seconds_between_looks):
                if self._stopping:
                    return
                if isinstance(key.data, _Rank):
                    self._read(key.data)
                elif isinstance(key.data, CoordinatorChild):
                    self._read_coordinator(key.data)
                else:
                    os.read(self._woken, 64)
            if self._reload:
                self._reload = False
                self._reload_experts()
            if time.monotonic() - looked >= self._seconds_between_looks:
                self._look_for_hangs()
                looked = time.monotonic()

    @property
    def _seconds_between_looks(self) -> float:
        timeout = self._config.step_timeout
        return _SECONDS_BETWEEN_LOOKS if timeout is None else min(_SECONDS_BETWEEN_LOOKS, timeout / 4)

    def _start(self, state: _Rank) -> None:
        Board.prepare(state.board, self._rows)
        config = replace(self._config, expert_placement=self._placements[-1])
        if state.limits is not None:
            # What the first start found out, and not what memory happens to be free now.
            limits = state.limits
            config = replace(
                config, num_blocks_override=limits.num_blocks, max_model_len=limits.max_model_len
            )
        place = state.place
        settings = CoreSettings(
            config=config,
            address=f"ipc://{self.folder}/core-{place.rank}-{place.incarnation}",
            board=str(state.board),
            place=place,
            coordinator=self.coordinator,
            log=logs.current(),
        )
        state.process = RankProcess(settings)
        self._selector.register(state.process, selectors.EVENT_READ, state)
        self._tell_loading(place, state.process)

    @property
    def _rows(self) -> int:
        return self._config.max_num_seqs * (self._config.pipeline_parallel_size + _SPARE_STEPS)

    def _start_coordinator(self, address: CoordinatorAddress) -> None:
        self._coordinator = CoordinatorChild(address)
        self._selector.register(self._coordinator, selectors.EVENT_READ, self._coordinator)

    def _read_coordinator(self, coordinator: CoordinatorChild) -> None:
        """Start the coordinator again if it has ended: nothing waits for it but its loads."""
        if not coordinator.read() and self.coordinator is not None:
            self._selector.unregister(coordinator)
            logger.error("the coordinator has ended (%s): starting it again", coordinator.ending())
            self._start_coordinator(self.coordinator)

    def _read(self, state: _Rank) -> None:
        process = state.process
        if process is None:  # ended meanwhile, with another rank
            return
        before = process.loading
        goes_on = process.read()
        if process.ready is None and process.loading is not before:
            self._tell_loading(state.place, process)
        if process.ready is not None and not state.is_up:
            state.is_up = True
            state.limits = state.limits or process.ready.limits
            place = state.place
            if place.incarnation:
                logger.info("rank %d is up again", place.rank)
            if all(other.is_up for other in self._ranks):
                del self._placements[:-1]
            self._tell(RankUp(place.rank, place.incarnation, process.address, process.ready.limits))
        if not goes_on:
            self._on_end(state, process)

    def _on_end(self, state: _Rank, process: RankProcess) -> None:
        """Handle the end of a rank: that of its whole group, where they run in lockstep."""
        together = state.limits is not None and state.limits.lockstep
        suspects = process.board.under_way()
        progress = process.board.progress()
        reason = self._take_down(state, process)
        logger.error("rank %d has ended: %s", state.place.rank, reason)
        early = state.note_death(progress.steps < _STEPS_THAT_PROVE_A_START and not progress.alone)
        # What the policy cannot order now it will hardly order after a restart: those who wait are told soon.
        fails_again = False
        if process.failed_in_scheduling:
            now = time.monotonic()
            fails_again = now - state.scheduling_failed < _SCHEDULING_WINDOW
            state.scheduling_failed = now
        self._tell_down(state, reason, suspects, progress.alone)
        group = [state]
        if together:
            for other in self._ranks:
                if other is not state and other.process is not None:
                    said = f"rank {state.place.rank}, with which it shares experts, has ended: {reason}"
                    other.process.kill(said)
                    self._take_down(other, other.process)
                    self._tell_down(other, said, [], alone=False)
                    group.append(other)
        if len(self._placements) > 1 and process.ready is None:
            logger.error("the new placement of experts is given up: %s", reason)
            self._placements.pop()
            self._restart(group)
        elif state.limits is None or self._config.max_rank_restarts == 0:
            self._give_up(group, reason)
        elif fails_again:
            self._give_up(group, f"{reason} (the second time within {_SCHEDULING_WINDOW:g} s)")
        elif early > self._config.max_rank_restarts:
            self._give_up(group, f"{reason} (the last of {early} early ends in {_WINDOW / 60:g} minutes)")
        else:
            self._restart(group)

    def _take_down(self, state: _Rank, process: RankProcess) -> str:
        """Wait for the end of a rank that has ended or was killed, and return its reason."""
        self._selector.unregister(process)
        state.process = None
        return process.ending()

    def _tell_down(self, state: _Rank, reason: str, suspects: Iterable[int], alone: bool) -> None:
        if state.is_up:
            state.is_up = False
            place = state.place
            found = [split_handle(handle) for handle in suspects]
            self._tell(RankDown(place.rank, place.incarnation, reason, found, alone))

    def _tell_loading(self, place: RankPlace, process: RankProcess) -> None:
        self._tell(RankLoading(place.rank, place.incarnation, process.began, process.loading))

    def _give_up(self, group: Iterable[_Rank], reason: str) -> None:
        for state in group:
            logger.error("rank %d is not started again: %s", state.place.rank, reason)
            self._tell(RankOut(state.place.rank, reason, ever_up=state.limits is not None))

    def _restart(self, group: Iterable[_Rank]) -> None:
        for state in group:
            place = state.place
            state.place = msgspec.structs.replace(
                place, incarnation=place.incarnation + 1, group=place.group + 1
            )
            logger.info("starting rank %d again", place.rank)
            self._start(state)

    def _reload_experts(self) -> None:
        self._placements.append(_kept_placement(self._config, self.folder))
        running = [state for state in self._ranks if state.process is not None]
        logger.info(
            "starting all ranks again with the placement of experts in %s", self._config.expert_placement
        )
        said = "the placement of experts is read again"
        for state in running:
            if state.process is not None:
                state.process.kill(said)
                self._take_down(state, state.process)
                self._tell_down(state, said, [], alone=False)
        self._restart(running)

    def _look_for_hangs(self) -> None:
        for state in self._ranks:
            if state.process is None or not state.is_up:
                continue
            progress = state.process.board.progress()
            limit = self._config.step_timeout or step_timeout(progress)
            if progress.idle_seconds > limit:
                state.process.kill(
                    f"the engine process made no progress for {progress.idle_seconds:.1f} s, and was killed"
                )

    def _tell(self, event: RankEvent) -> None:
        with self._telling:
            if self._listener is None:
                self._untold.append(event)
            else:
                self._listener(event)


def step_timeout(progress: Progress) -> float:
    """Return the seconds without progress after which a core counts as hung, by default.

    A step of many tokens may be far longer than those of few that were seen: it gets the time of so many of
    the slowest.
    """
    if progress.steps == 0:
        return _FIRST_STEP_TIMEOUT
    longest = max(progress.longest_step, progress.slowest_token * progress.tokens)
    return max(_LEAST_STEP_TIMEOUT, _TIMES_AS_LONG * longest)


def _coordinator_address(config: EngineConfig, folder: Path) -> CoordinatorAddress | None:
    """Return where the coordinator is, or is to be; None where one rank needs none."""
    if config.coordinator is not None:
        assert config.coordinator_key is not None, "EngineConfig takes both or none"
        return tcp_address(config.coordinator, read_key(Path(config.coordinator_key)))
    if config.data_parallel_size == 1:
        return None
    return CoordinatorAddress(f"ipc://{folder}/reports", f"ipc://{folder}/snapshots")


def _kept_placement(config: EngineConfig, folder: Path) -> str | None:
    """Copy the file that places experts, so that all ranks have the same whenever they start."""
    if config.expert_placement is None:
        return None
    kept = folder / f"placement-{time.monotonic_ns()}.json"
    try:
        shutil.copyfile(config.expert_placement, kept)
    except OSError:
        return config.expert_placement  # which the ranks cannot read either, and say so
    return str(kept)
