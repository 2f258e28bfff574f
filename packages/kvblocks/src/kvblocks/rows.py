"""Which rows are open, for whom, and how much of each is computed."""

import numpy as np
from numpy.typing import ArrayLike

from kvblocks.prefix import Prefix


class OpenRows:
    """Columns of length `max_rows`.

    `is_open` is bool. `computed` (int32) counts the tokens of an open row whose keys and values exist: the
    full blocks among them are published, all others are not.
    """

    def __init__(self, max_rows: int) -> None:
        # Negative row numbers reach back into the second half, which is never open.
        self._open_or_never = np.zeros(2 * max_rows, np.bool_)
        self.is_open = self._open_or_never[:max_rows]
        self.computed = np.zeros(max_rows, np.int32)
        self._prefixes: list[Prefix | None] = [None] * max_rows

    def begin(self, row: int, prefix: Prefix, computed: int) -> None:
        """Open a row with `computed` tokens."""
        prefix.row = row
        self._prefixes[row] = prefix
        self.is_open[row] = True
        self.computed[row] = computed

    def end(self, row: int) -> None:
        """Close an open row. Its prefix knows then of all that was computed."""
        prefix = self.prefix(row)
        prefix.num_tokens = max(prefix.num_tokens, int(self.computed[row]))
        prefix.row = -1
        self._prefixes[row] = None
        self.is_open[row] = False

    def prefix(self, row: int) -> Prefix:
        """The prefix of an open row."""
        prefix = self._prefixes[row]
        assert prefix is not None, f"row {row} is open without a prefix"
        return prefix

    def require_vacant(self, row: int) -> None:
        """ValueError unless the row exists and is not open."""
        if not 0 <= row < self.is_open.size:
            raise ValueError(f"rows go from 0 to {self.is_open.size - 1}, not {row}")
        if self.is_open[row]:
            raise ValueError(f"row {row} is open already")

    def require_open(self, rows: ArrayLike) -> None:
        """ValueError unless all of `rows` (int [n]) are open."""
        rows = np.asarray(rows, np.intp)
        try:
            is_open = self._open_or_never[rows]
        except IndexError:
            is_open = np.zeros(rows.size, np.bool_)
        if np.count_nonzero(is_open) < rows.size:
            last = self.is_open.size - 1
            if rows.min() < 0 or rows.max() > last:
                raise ValueError(f"rows go from 0 to {last}, not from {rows.min()} to {rows.max()}")
            raise ValueError(f"rows {rows[~is_open].tolist()} are not open")
