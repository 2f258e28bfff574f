"""Requests between `add` and their first step, or between preemption and the next."""

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsched.request import Request


@dataclass(slots=True, eq=False)
class Entry:
    """A live request.

    `tokens` are all it had when it last joined the queue; while it has a row they are in the row's columns.
    """

    request: Request
    rank: float
    turn: int
    target: int
    """Tokens at which it ends, prompt included."""
    prefix: Any
    tokens: NDArray[np.int32]
    queued_at: float
    held: bool
    """Whether it is passed over until it is released."""
    num_cached: int = 0
    admitted: bool = False
    """Whether it has ever had a row."""
    row: int = -1
    waiting: bool = False
    ticket: int = 0
    """Its latest place in the queue's heap; 0 for none."""


class WaitingQueue:
    """Entries by rank, and of equals by turn. Those held are counted, and have no place until released."""

    def __init__(self) -> None:
        # Places that were given up stay until they surface: those whose ticket is not their entry's own.
        self._heap: list[tuple[float, int, int, Entry]] = []
        self._tickets = 0
        self._ready = 0
        self.num_held = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        """All that wait, held or not."""
        return self._ready + self.num_held

    @property
    def has_ready(self) -> bool:
        """Whether there is a first."""
        return self._ready > 0

    def push(self, entry: Entry) -> None:
        entry.waiting = True
        self.num_tokens += entry.tokens.size
        self._place(entry)

    def first(self) -> Entry:
        """The entry whose turn it is. One must be ready."""
        while self._heap[0][2] != self._heap[0][3].ticket:
            heapq.heappop(self._heap)
        return self._heap[0][3]

    def pop(self) -> Entry:
        """Take the first entry out."""
        entry = self.first()
        heapq.heappop(self._heap)
        self._forget(entry)
        return entry

    def discard(self, entry: Entry) -> None:
        """Take out any entry that waits."""
        self._forget(entry)
        self._tidy()

    def hold(self, entry: Entry, held: bool) -> None:
        """Pass over an entry that waits, or give it its place back."""
        self._displace(entry)
        entry.held = held
        self._place(entry)
        self._tidy()

    def _place(self, entry: Entry) -> None:
        if entry.held:
            self.num_held += 1
            return
        self._ready += 1
        self._tickets += 1
        entry.ticket = self._tickets
        heapq.heappush(self._heap, (entry.rank, entry.turn, entry.ticket, entry))

    def _displace(self, entry: Entry) -> None:
        if entry.held:
            self.num_held -= 1
        else:
            self._ready -= 1
            entry.ticket = 0

    def _forget(self, entry: Entry) -> None:
        self._displace(entry)
        entry.waiting = False
        self.num_tokens -= entry.tokens.size

    def _tidy(self) -> None:
        if len(self._heap) > 2 * self._ready + 16:
            self._heap = [place for place in self._heap if place[2] == place[3].ticket]
            heapq.heapify(self._heap)
