"""Several values for each of some rows, one row after the other."""

import numpy as np
from numpy.typing import NDArray


def runs(counts: NDArray[np.integer]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """For `counts[i]` values of each `i`: whose each is, and which of its own; both intp [sum of counts].

    `runs([2, 0, 3])` is `[0, 0, 2, 2, 2]` and `[0, 1, 0, 1, 2]`.
    """
    owners = np.repeat(np.arange(counts.size), counts)
    before = np.cumsum(counts) - counts
    return owners, np.arange(owners.size) - before[owners]
