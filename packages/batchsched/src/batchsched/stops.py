"""Which tokens end which rows."""

import numpy as np
from numpy.typing import NDArray

# A request with more stop ids than this is looked up in a set of its own.
_COLUMNS = 8
_NO_ID = -(2**31)


class StopIds:
    """The stop ids of every row, tested for a whole step at once."""

    def __init__(self, num_rows: int) -> None:
        # One array a column, so that only as many are compared as some row has needed: int32 [columns, rows].
        self._ids = np.full((_COLUMNS, num_rows), _NO_ID, np.int32)
        self._width = 0
        self._sets: list[frozenset[int]] = [frozenset()] * num_rows
        self._has_set = np.zeros(num_rows, np.bool_)

    def set(self, row: int, ids: tuple[int, ...]) -> None:
        many = len(ids) > _COLUMNS
        self._has_set[row] = many
        self._sets[row] = frozenset(ids) if many else frozenset()
        self._ids[:, row] = _NO_ID
        if not many:
            self._ids[: len(ids), row] = ids
            self._width = max(self._width, len(ids))

    def hit(self, rows: NDArray[np.intp], tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Whether `tokens[i]` is a stop id of `rows[i]`; bool [n]."""
        hit = np.zeros(rows.size, np.bool_)
        for column in self._ids[: self._width]:
            hit |= column[rows] == tokens
        for index in np.flatnonzero(self._has_set[rows]).tolist():
            hit[index] = int(tokens[index]) in self._sets[int(rows[index])]
        return hit
