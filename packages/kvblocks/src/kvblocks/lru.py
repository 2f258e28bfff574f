"""LRU queue of block ids with bulk append, pop, and removal from the middle."""

import numpy as np
from numpy.typing import NDArray

from kvblocks.errors import require

# pop looks at this many entries at once at least, so that a run of dead entries is passed in few steps.
_WINDOW = 256


class LruQueue:
    """Distinct block ids in the order they were appended.

    A linked list would cost Python work per block. Instead the ids lie in one array, appended at its tail and
    popped at its head, and `_place[block]` is the index of a block's live entry. Removing a block clears its
    place and leaves a dead entry behind. When the tail reaches the end of the array the live
    entries move to the front; the array is twice as long as there are blocks, so a move happens once in
    `num_blocks` appends at most and costs O(1) a block.

        queue  [ 7 | 2 | 7 | 5 | . | . ]      place[7] = 2, place[5] = 3, place[2] = -1
                 x   x        head = 0, tail = 4: pop gives 7, then 5
    """

    def __init__(self, num_blocks: int) -> None:
        self._queue = np.empty(2 * num_blocks, np.int32)
        self._place = np.full(num_blocks, -1, np.int32)
        self._head = 0
        self._tail = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def append(self, blocks: NDArray[np.int32]) -> None:
        """Add `blocks` (int32 [n], distinct, none of them queued) as the newest, the last of them newest."""
        if self._tail + blocks.size > self._queue.size:
            self._compact()
        end = self._tail + blocks.size
        self._queue[self._tail : end] = blocks
        self._place[blocks] = np.arange(self._tail, end, dtype=np.int32)
        self._tail = end
        self._size += blocks.size

    def remove(self, blocks: NDArray[np.int32]) -> None:
        """Take `blocks` (int32 [n], distinct, all of them queued) out, from anywhere in the queue."""
        self._place[blocks] = -1
        self._size -= blocks.size

    def pop(self, n: int) -> NDArray[np.int32]:
        """Take out the `n` oldest blocks (`n` ≤ len), oldest first."""
        oldest = [np.empty(0, np.int32)]
        missing = n
        while missing:
            window = self._queue[self._head : min(self._head + max(missing, _WINDOW), self._tail)]
            require(window.size > 0, f"cannot pop {n} blocks from a queue of {n - missing}")
            live = np.flatnonzero(self._is_live(self._head, window))[:missing]
            missing -= live.size
            oldest.append(window[live])
            self._head += window.size if missing else int(live[-1]) + 1
        popped = np.concatenate(oldest)
        self.remove(popped)
        return popped

    def blocks(self) -> NDArray[np.int32]:
        """The queued blocks, oldest first."""
        entries = self._queue[self._head : self._tail]
        return entries[self._is_live(self._head, entries)]

    def check(self) -> None:
        """Raise IntegrityError unless places, entries and size agree."""
        placed = np.flatnonzero(self._place >= 0)
        live = self.blocks()
        require(
            placed.size == live.size == self._size,
            f"queue of {self._size} blocks has {live.size} live entries and {placed.size} placed blocks",
        )

    def _is_live(self, start: int, entries: NDArray[np.int32]) -> NDArray[np.bool_]:
        return self._place[entries] == np.arange(start, start + entries.size, dtype=np.int32)

    def _compact(self) -> None:
        live = self.blocks()
        self._queue[: live.size] = live
        self._place[live] = np.arange(live.size, dtype=np.int32)
        self._head = 0
        self._tail = live.size
