"""Part of a step: some rows, and how far each runs."""

from bisect import bisect_right
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchsched.memory import Memory


class Batch(NamedTuple):
    """Rows, the position each starts from, and the tokens each runs; intp, int32 and int32 [n]."""

    rows: NDArray[np.intp]
    starts: NDArray[np.int32]
    counts: NDArray[np.int32]

    @property
    def ends(self) -> NDArray[np.int32]:
        return self.starts + self.counts

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    @classmethod
    def empty(cls) -> "Batch":
        return cls(np.empty(0, np.intp), np.empty(0, np.int32), np.empty(0, np.int32))

    def only(self, keep: NDArray[np.bool_]) -> "Batch":
        return Batch(self.rows[keep], self.starts[keep], self.counts[keep])

    def within(self, budget: int) -> "Batch":
        """At most `budget` tokens: those first in line come first, and the last may get a part."""
        if self.num_tokens <= budget:
            return self
        left = budget - (np.cumsum(self.counts) - self.counts)
        counts = np.clip(left, 0, self.counts).astype(np.int32)
        return self._replace(counts=counts).only(counts > 0)

    def up_to(self, ends: NDArray[np.int32]) -> "Batch":
        """No row further than `ends` (int32 [n]), which lie behind its start."""
        return self._replace(counts=np.minimum(self.counts, ends - self.starts))

    def num_fitting(self, memory: Memory, blocks: int) -> int:
        """How many of the rows, from the first on, can grow with so many blocks."""
        ends = self.ends
        if memory.needed(self.rows, ends) <= blocks:
            return self.rows.size
        return bisect_right(
            range(1, self.rows.size + 1),
            blocks,
            key=lambda size: memory.needed(self.rows[:size], ends[:size]),
        )

    def joined(self, other: "Batch") -> "Batch":
        """The rows of both."""
        if other.rows.size == 0:
            return self
        return Batch(*(np.concatenate(columns) for columns in zip(self, other)))
