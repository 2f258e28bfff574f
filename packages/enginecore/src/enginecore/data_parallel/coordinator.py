"""The coordinator, without input or output: loads in, snapshots out, waves and addresses passed on."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from enginecore.data_parallel.messages import (
    SIGN_OF_LIFE,
    AskStatus,
    ClockOffset,
    GroupAddress,
    LoadReport,
    NeedWave,
    RankStatus,
    RegisterAgain,
    RegisterFrontend,
    RegisterRank,
    Snapshot,
    StartWave,
    Status,
    ToCoordinator,
    ToRank,
    WaveEnded,
)
from enginecore.data_parallel.waves import Waves

SNAPSHOT_INTERVAL = 0.05
"""Least seconds from one snapshot to the next."""
SILENCE = 10.0
"""Seconds without a message, of which there is one a second, after which a rank or front-end is forgotten."""


class Send(NamedTuple):
    """A message and the ZMQ identity that it goes to."""

    to: bytes
    message: ToRank | Status


@dataclass(slots=True)
class _Rank:
    identity: bytes
    registration: RegisterRank
    heard_at: float
    report: LoadReport | None = None
    reported_at: float = 0.0
    clock: ClockOffset = field(default_factory=ClockOffset)


@dataclass(slots=True)
class _Frontend:
    index: int
    heard_at: float


class Coordinator:
    """Ranks and front-ends that have registered, the newest load of each rank, and the waves of a group.

    Times are seconds of one clock, such as `time.monotonic()`.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self._ranks: dict[int, _Rank] = {}
        self._rank_of: dict[bytes, int] = {}
        self._frontends: dict[bytes, _Frontend] = {}
        self._waves: Waves | None = None
        """Those of the newest group; None until a rank registers that runs in lockstep."""
        self._address: GroupAddress | None = None
        self._changed = False
        self._sent_at = now - SNAPSHOT_INTERVAL
        self._messages = 0
        self._snapshots = 0

    def receive(self, sender: bytes, message: ToCoordinator, now: float) -> list[Send]:
        """Take a message from the ZMQ identity `sender`, and return what is to be sent."""
        self._messages += 1
        if isinstance(message, RegisterRank):
            return self._register(sender, message, now)
        if isinstance(message, RegisterFrontend):
            self._changed |= sender not in self._frontends
            self._frontends[sender] = _Frontend(message.index, now)
            return []
        if isinstance(message, AskStatus):
            return [Send(sender, self.status(now))]
        number = self._rank_of.get(sender)
        if number is None or number != message.rank:
            return [Send(sender, RegisterAgain())]
        rank = self._ranks[number]
        rank.heard_at = now
        match message:
            case LoadReport():
                self._take(rank, message, now)
            case NeedWave() | WaveEnded():
                return self._take_wave(rank, message)
            case GroupAddress():
                return self._pass_on(message)
        return []

    def snapshot(self, now: float) -> Snapshot | None:
        """Return a snapshot to be sent to all front-ends, None if none is due."""
        if self.wait(now) > 0:
            return None
        self._forget(now)
        self._sent_at, self._changed = now, False
        self._snapshots += 1
        ranks = [self._ranks[number] for number in sorted(self._ranks)]
        ready = [rank for rank in ranks if rank.registration.num_blocks]
        reports = [rank.report or _NO_REPORT for rank in ready]
        return Snapshot(
            at=now,
            ranks=_column([rank.registration.rank for rank in ready]),
            incarnations=_column([rank.registration.incarnation for rank in ready]),
            ages=np.array([now - rank.reported_at if rank.report else -1 for rank in ready], np.float32),
            waiting=_column([report.waiting for report in reports]),
            running=_column([report.running for report in reports]),
            free_blocks=_column([report.free_blocks for report in reports]),
            num_blocks=_column([rank.registration.num_blocks for rank in ready]),
        )

    def wait(self, now: float) -> float:
        """Return the seconds until a snapshot is due, if no message comes before; 0 or less: now."""
        return self._sent_at + (SNAPSHOT_INTERVAL if self._changed else SIGN_OF_LIFE) - now

    def status(self, now: float) -> Status:
        """Return who is registered, and what has been counted."""
        return Status(
            uptime=now - self._began,
            messages=self._messages,
            snapshots=self._snapshots,
            frontends=sorted(frontend.index for frontend in self._frontends.values()),
            ranks=[_status_of(self._ranks[number], now) for number in sorted(self._ranks)],
            waves=None if self._waves is None else self._waves.status(),
        )

    def _register(self, sender: bytes, message: RegisterRank, now: float) -> list[Send]:
        known = self._ranks.get(message.rank)
        if known is not None and message.incarnation < known.registration.incarnation:
            return []  # from a process that has ended since
        if known is None or message.incarnation > known.registration.incarnation:
            if known is not None:
                del self._rank_of[known.identity]
            known = self._ranks[message.rank] = _Rank(sender, message, now)
            self._changed = True
        elif sender != known.identity:
            del self._rank_of[known.identity]
            known.identity = sender
        self._rank_of[sender] = message.rank
        self._changed |= known.registration.num_blocks != message.num_blocks
        known.registration, known.heard_at = message, now
        sends = self._join_waves(message)
        if self._address is not None and _meets_at(known, self._address):
            sends.append(Send(sender, self._address))
        return sends

    def _join_waves(self, message: RegisterRank) -> list[Send]:
        if message.wave is None:
            return []
        if self._waves is None or message.group > self._waves.group:
            self._waves = Waves(message.group, message.num_ranks)
        if message.group < self._waves.group:
            return []
        return self._start_wave(self._waves, self._waves.register(message, message.wave))

    def _take_wave(self, rank: _Rank, message: NeedWave | WaveEnded) -> list[Send]:
        waves = self._waves
        if waves is None or rank.registration.group != waves.group:
            return []
        if isinstance(message, NeedWave):
            return self._start_wave(waves, waves.need(message))
        return self._start_wave(waves, waves.end(message))

    def _take(self, rank: _Rank, report: LoadReport, now: float) -> None:
        before, rank.report = rank.report, report
        rank.reported_at = rank.clock.local(report.at, now)
        self._changed |= before is None or (report.waiting, report.running, report.free_blocks) != (
            before.waiting,
            before.running,
            before.free_blocks,
        )

    def _start_wave(self, waves: Waves, ranks: list[int]) -> list[Send]:
        message = StartWave(waves.started)
        return [Send(self._ranks[rank].identity, message) for rank in ranks if rank in self._ranks]

    def _pass_on(self, message: GroupAddress) -> list[Send]:
        """Keep the address where a group meets, and send it to the ranks that load their models."""
        if self._address is not None and message.group < self._address.group:
            return []
        self._address = message
        return [Send(rank.identity, message) for rank in self._ranks.values() if _meets_at(rank, message)]

    def _forget(self, now: float) -> None:
        for number, rank in list(self._ranks.items()):
            if now - rank.heard_at > SILENCE:
                del self._ranks[number], self._rank_of[rank.identity]
        for identity, frontend in list(self._frontends.items()):
            if now - frontend.heard_at > SILENCE:
                del self._frontends[identity]


_NO_REPORT = LoadReport(rank=0, at=0, waiting=0, running=0, free_blocks=0, tokens=0, step_seconds=0, steps=0)


def _column(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


def _meets_at(rank: _Rank, address: GroupAddress) -> bool:
    """Whether a rank is to be told where its group meets: until its model is loaded."""
    registration = rank.registration
    return (
        registration.group == address.group
        and registration.num_blocks == 0
        and registration.rank != address.rank
    )


def _status_of(rank: _Rank, now: float) -> RankStatus:
    registration, report = rank.registration, rank.report or _NO_REPORT
    return RankStatus(
        rank=registration.rank,
        incarnation=registration.incarnation,
        ready=registration.num_blocks > 0,
        age=now - rank.heard_at,
        waiting=report.waiting,
        running=report.running,
        free_blocks=report.free_blocks,
        num_blocks=registration.num_blocks,
        tokens=report.tokens,
        step_seconds=report.step_seconds,
        steps=report.steps,
        wave=registration.wave,
    )
