"""Routing policy: the rank of a request, from the loads of all ranks. Pure; a column has one entry a rank."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_WAITING = 4
"""A request that waits costs as much as this many that run."""
_FULL = 1000
"""Score of a KV cache without a free block, as much as 250 waiting requests."""
_STEEPNESS = 32
"""Exponent of the penalty: a cache filled to 80 % scores 0, to 90 % 34, to 95 % 193."""
_BUSY_FACTOR = 2
_BUSY_MARGIN = 8
"""A rank is busy if its score is above the least one's times the factor, plus the margin."""


class RankLoads(NamedTuple):
    """Loads of all ranks; a column each."""

    up: NDArray[np.bool_]
    """Whether the rank takes requests."""
    waiting: NDArray[np.int64]
    running: NDArray[np.int64]
    sent: NDArray[np.int64]
    """Requests sent to it that its report does not count yet."""
    free_blocks: NDArray[np.int64]
    num_blocks: NDArray[np.int64]
    """KV cache blocks; 0: unknown, taken for an empty cache."""


def scores(loads: RankLoads) -> NDArray[np.int64]:
    """Return the load of each rank as one number, in running requests.

    4 × (waiting + sent) + running, plus a penalty as the KV cache fills, in whole numbers: ranks that differ
    by a few blocks are a tie.
    """
    num_blocks = np.maximum(loads.num_blocks, 1)
    used = np.where(loads.num_blocks > 0, 1 - loads.free_blocks / num_blocks, 0)
    penalty = (_FULL * used**_STEEPNESS).astype(np.int64)
    return _WAITING * (loads.waiting + loads.sent) + loads.running + penalty


def choose(loads: RankLoads, turn: int, cached: NDArray[np.int64] | None = None) -> int | None:
    """Return the index of the rank that a request goes to; None if no rank is up.

    That is the rank with the lowest score. Given `cached`, the tokens of the prompt that each rank has
    cached, int64 [ranks], it is among those not busy the one that has most of them, and of equal ones that
    with the lowest score. Ties are taken in turn: count `turn` up from one call to the next, and let it begin
    at another number in each front-end, or all of them choose alike.
    """
    ranks = np.flatnonzero(loads.up)
    if not ranks.size:
        return None
    score = scores(loads)[ranks]
    if cached is not None:
        free = score <= _BUSY_FACTOR * score.min() + _BUSY_MARGIN
        ranks, score = ranks[free], score[free]
        longest = cached[ranks] == cached[ranks].max()
        ranks, score = ranks[longest], score[longest]
    ties = ranks[score == score.min()]
    return int(ties[turn % ties.size])
