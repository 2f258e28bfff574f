"""Whose turn it is where a model is a pipeline of stages, each at work on another step."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from batchsched.flights import Flight
from batchsched.rows import Rows


def in_turn(
    rows: Rows, counts: NDArray[np.int32], flights: Iterable[Flight], stages: int
) -> NDArray[np.bool_]:
    """Which rows in line the next step takes, bool [n], of which each has `counts` tokens left to run.

    A row whose newest token is in flight sits out: the first stage could not run what is not known there.
    So rows that decode are dealt out, the first in line first: each of `stages` steps takes an equal share of
    them, and where some are left over, so many of these steps take one more. Chunks of a prompt wait for
    nothing, and may follow each other in every step.
    """
    decoding = counts <= 1
    ready = decoding & (rows.expected[rows.line] == rows.num_tokens[rows.line])
    share, remainder = divmod(int(np.count_nonzero(decoding)), stages)
    if remainder:
        sizes = (np.count_nonzero(rows.in_line[flight.sampling]) for flight in flights)
        share += sum(size > share for size in sizes) < remainder
    return ~decoding | (ready & (np.cumsum(ready) <= share))
