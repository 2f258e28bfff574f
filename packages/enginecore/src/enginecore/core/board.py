"""The board: one core's progress, its counters and the requests in its steps, in a file of shared memory.

The core writes it and processes of its host read it, without a message. It outlives the core: who started
that reads there how far it came, and a core that is started again on it goes on counting.
"""

import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from enginecore.messages import STEP_BOUNDS, EngineStats

_PROGRESS = ("alive", "steps", "longest", "slowest", "tokens", "alone", "under_way")
_COUNTERS = (
    "preemptions",
    "prefix_queries",
    "prefix_hits",
    "prompt_tokens",
    "generation_tokens",
    "ran_tokens",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
)
_GAUGES = ("running", "waiting", "free_blocks", "num_blocks")
_BUCKETS = len(STEP_BOUNDS) + 1
_FIELDS = {name: place for place, name in enumerate((*_PROGRESS, *_GAUGES, *_COUNTERS))}
_FIRST_BUCKET = len(_FIELDS)
_FIRST_ENTRY = _FIRST_BUCKET + _BUCKETS
_SIZE = 8
"""Bytes of a field: all are int64."""


class Progress(NamedTuple):
    """How far a core has come since it was started."""

    idle_seconds: float
    """Since its loop last went round."""
    steps: int
    longest_step: float
    """Seconds."""
    slowest_token: float
    """Seconds of a step by its tokens, the most that there was."""
    tokens: int
    """Of the steps under way."""
    alone: bool
    """Whether the step under way is a trial of one request."""


class Board:
    """A board that its core has open for writing, or another process for reading."""

    def __init__(self, path: Path) -> None:
        """Open the board that `prepare` made."""
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._fields: NDArray[np.int64] = np.frombuffer(self._memory, np.int64)
        self._before = self._fields.copy()
        """Counters of earlier cores, to which those of this one are added."""

    @staticmethod
    def prepare(path: Path, rows: int) -> None:
        """Make the board of a core with at most `rows` rows in the steps under way, or clear its progress.

        Counters stay.
        """
        size = _SIZE * (_FIRST_ENTRY + rows)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, size)
            cleared = np.zeros(len(_PROGRESS) + len(_GAUGES), np.int64)
            cleared[_FIELDS["alive"]] = time.monotonic_ns()
            os.pwrite(descriptor, cleared.tobytes(), 0)
        finally:
            os.close(descriptor)

    def beat(self) -> None:
        """Note that the core's loop goes round."""
        self._fields[_FIELDS["alive"]] = time.monotonic_ns()

    def begin_step(self, handles: Sequence[NDArray[np.int64]], tokens: int, alone: bool) -> None:
        """Note the requests of the steps under way, one of which, of `tokens`, is about to start."""
        self._set_under_way(handles)
        self._fields[_FIELDS["tokens"]] += tokens
        self._fields[_FIELDS["alone"]] = alone
        self.beat()

    def end_step(self, handles: Sequence[NDArray[np.int64]], tokens: int, seconds: float) -> None:
        """Note the requests of the steps that are left under way after one, of `tokens`, has ended."""
        self._set_under_way(handles)
        self._fields[_FIELDS["tokens"]] -= tokens
        self._fields[_FIELDS["alone"]] = False
        self._fields[_FIELDS["steps"]] += 1
        nanoseconds = int(seconds * 1e9)
        for name, value in (("longest", nanoseconds), ("slowest", nanoseconds // max(tokens, 1))):
            if value > self._fields[_FIELDS[name]]:
                self._fields[_FIELDS[name]] = value
        self.beat()

    def publish(self, stats: EngineStats) -> None:
        """Show a core's state; its counters count from its own start."""
        fields, before = self._fields, self._before
        for name in _GAUGES:
            fields[_FIELDS[name]] = getattr(stats, name)
        for name in _COUNTERS:
            fields[_FIELDS[name]] = before[_FIELDS[name]] + getattr(stats, name)
        buckets = slice(_FIRST_BUCKET, _FIRST_ENTRY)
        fields[buckets] = before[buckets] + stats.step_buckets

    def stats(self) -> EngineStats:
        """Return what the core has shown; counters are those of all cores that had this board."""
        fields = self._fields[:_FIRST_ENTRY].copy()
        values = {name: int(fields[_FIELDS[name]]) for name in (*_GAUGES, *_COUNTERS)}
        return EngineStats(**values, step_buckets=fields[_FIRST_BUCKET:].tolist())

    def progress(self) -> Progress:
        """Return how far the core has come."""
        alive, steps, longest, slowest, tokens, alone = self._fields[: _FIELDS["under_way"]].tolist()
        idle = (time.monotonic_ns() - alive) / 1e9
        return Progress(idle, steps, longest / 1e9, slowest / 1e9, tokens, bool(alone))

    def under_way(self) -> list[int]:
        """Return the handles of requests in the steps under way."""
        count = int(self._fields[_FIELDS["under_way"]])
        return list(dict.fromkeys(self._fields[_FIRST_ENTRY : _FIRST_ENTRY + count].tolist()))

    def _set_under_way(self, handles: Sequence[NDArray[np.int64]]) -> None:
        count = _FIELDS["under_way"]
        self._fields[count] = 0
        end = _FIRST_ENTRY
        for some in handles:
            self._fields[end : end + some.size] = some
            end += some.size
        self._fields[count] = end - _FIRST_ENTRY
