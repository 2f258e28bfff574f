"""The waiting queue: requests between `add` and their first step, or between preemption and resumption."""

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsched.records import Request


@dataclass(slots=True, eq=False)
class Entry:
    """A live request, waiting or running.

    `tokens` are all it had when it last joined the queue; while it has a row they are in the row's columns.
    """

    request: Request
    rank: float
    arrival_index: int
    target: int
    """Number of tokens at which it ends, prompt included."""
    prefix: Any
    tokens: NDArray[np.int32]
    queued_at: float
    held: bool
    """Whether it is skipped until it is released."""
    num_cached: int = 0
    admitted: bool = False
    """Whether it has ever had a row."""
    row: int = -1
    waiting: bool = False
    heap_id: int = 0
    """Identifies its current element of the queue's heap; 0 for none."""


class WaitingQueue:
    """Entries by rank, then arrival index. Held entries are counted, but are not in the order."""

    def __init__(self) -> None:
        # Removal is lazy: an element whose heap_id is no longer its entry's is dropped when it surfaces.
        self._heap: list[tuple[float, int, int, Entry]] = []
        self._last_heap_id = 0
        self._num_ready = 0
        self.num_held = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        """Number of entries, held or not."""
        return self._num_ready + self.num_held

    @property
    def has_ready(self) -> bool:
        """Whether any entry is not held."""
        return self._num_ready > 0

    def push(self, entry: Entry) -> None:
        """Add an entry."""
        entry.waiting = True
        self.num_tokens += entry.tokens.size
        self._insert(entry)

    def first(self) -> Entry:
        """Return the first entry that is not held. There must be one."""
        while self._heap[0][2] != self._heap[0][3].heap_id:
            heapq.heappop(self._heap)
        return self._heap[0][3]

    def pop(self) -> Entry:
        """Remove and return the first entry that is not held. There must be one."""
        entry = self.first()
        heapq.heappop(self._heap)
        self._forget(entry)
        return entry

    def remove(self, entry: Entry) -> None:
        """Remove any entry of the queue."""
        self._forget(entry)
        self._compact()

    def set_held(self, entry: Entry, held: bool) -> None:
        """Skip an entry of the queue, or return it to its place in the order."""
        self._withdraw(entry)
        entry.held = held
        self._insert(entry)
        self._compact()

    def _insert(self, entry: Entry) -> None:
        if entry.held:
            self.num_held += 1
            return
        self._num_ready += 1
        self._last_heap_id += 1
        entry.heap_id = self._last_heap_id
        heapq.heappush(self._heap, (entry.rank, entry.arrival_index, entry.heap_id, entry))

    def _withdraw(self, entry: Entry) -> None:
        if entry.held:
            self.num_held -= 1
        else:
            self._num_ready -= 1
            entry.heap_id = 0

    def _forget(self, entry: Entry) -> None:
        self._withdraw(entry)
        entry.waiting = False
        self.num_tokens -= entry.tokens.size

    def _compact(self) -> None:
        if len(self._heap) > 2 * self._num_ready + 16:
            self._heap = [element for element in self._heap if element[2] == element[3].heap_id]
            heapq.heapify(self._heap)
