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
    num_cached: int = 0
    admitted: bool = False
    """Whether it has ever had a row."""
    row: int = -1
    waiting: bool = False


class WaitingQueue:
    """Entries by rank, and of equals by turn."""

    def __init__(self) -> None:
        # An entry discarded from the middle stays, unmarked as waiting, until it surfaces.
        self._heap: list[tuple[float, int, Entry]] = []
        self._size = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self._size

    def push(self, entry: Entry) -> None:
        entry.waiting = True
        self._size += 1
        self.num_tokens += entry.tokens.size
        heapq.heappush(self._heap, (entry.rank, entry.turn, entry))

    def first(self) -> Entry:
        """The entry whose turn it is. The queue must not be empty."""
        while not self._heap[0][2].waiting:
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def pop(self) -> Entry:
        """Take the first entry out."""
        entry = self.first()
        heapq.heappop(self._heap)
        self._forget(entry)
        return entry

    def discard(self, entry: Entry) -> None:
        """Take out any entry that waits; it is never pushed again."""
        self._forget(entry)
        if len(self._heap) > 2 * self._size + 16:
            self._heap = [item for item in self._heap if item[2].waiting]
            heapq.heapify(self._heap)

    def _forget(self, entry: Entry) -> None:
        entry.waiting = False
        self._size -= 1
        self.num_tokens -= entry.tokens.size
