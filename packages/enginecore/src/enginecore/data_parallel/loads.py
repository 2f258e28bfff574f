"""A front-end's view of the ranks' loads: snapshots of the coordinator, and its own requests since."""

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from enginecore.data_parallel.messages import ClockOffset, Snapshot
from enginecore.data_parallel.routing import RankLoads, choose

_ON_THE_WAY = 0.005
"""Seconds within which a request that was sent is read by an idle rank."""
_SILENCE = 3.0
"""Seconds without a snapshot, of which there is one a second, after which the coordinator counts as away."""


class LoadView:
    """Loads of the ranks that a front-end sends requests to.

    A rank is as loaded as its last report says, plus the requests sent since. Where there is no report (the
    coordinator is away, or has not heard of this start of the rank yet), it is as loaded as the front-end's
    own requests make it: those sent and not ended.

    Times are seconds of `time.monotonic()`.
    """

    def __init__(self, ranks: Sequence[int], frontend: int = 0) -> None:
        """`ranks` are their numbers, ascending; none is up yet. `frontend` is the front-end's index."""
        size = len(ranks)
        self.ranks: NDArray[np.int64] = np.array(ranks, np.int64)
        self._index = {rank: index for index, rank in enumerate(ranks)}
        self._turn = frontend
        self._up = np.zeros(size, np.bool_)
        self._incarnations = np.full(size, -1, np.int64)
        self._reported = np.zeros(size, np.bool_)
        self._waiting, self._running, self._free_blocks, self._num_blocks = np.zeros((4, size), np.int64)
        self._open = np.zeros(size, np.int64)
        self._sent = np.zeros(size, np.int64)
        self._times: list[deque[float]] = [deque() for _ in ranks]
        """When the requests counted in `_sent` were sent."""
        self._clock = ClockOffset()
        self._heard_at = -np.inf

    @property
    def open(self) -> dict[int, int]:
        """Requests of this front-end that each rank has, by rank."""
        return dict(zip(self.ranks.tolist(), self._open.tolist()))

    def set_up(self, rank: int, incarnation: int) -> None:
        """Take note that a rank takes requests, from now on in its start number `incarnation`."""
        index = self._index[rank]
        self._forget(index)
        self._up[index] = True
        self._incarnations[index] = incarnation

    def set_down(self, rank: int) -> None:
        """Take note that a rank has ended or must get no requests; those it had count no more."""
        index = self._index[rank]
        self._forget(index)
        self._up[index] = False

    def update(self, snapshot: Snapshot, now: float) -> None:
        """Take the loads of a snapshot, and forget the requests sent that its reports count already."""
        self._heard_at = now
        at = self._clock.local(snapshot.at, now)
        places = np.searchsorted(snapshot.ranks, self.ranks)
        found = places < len(snapshot.ranks)
        places[~found] = 0
        if not len(snapshot.ranks):
            self._reported[:] = False
            return
        self._reported = (
            found
            & (snapshot.ranks[places] == self.ranks)
            & (snapshot.incarnations[places] == self._incarnations)
            & (snapshot.ages[places] >= 0)
        )
        for column, values in (
            (self._waiting, snapshot.waiting),
            (self._running, snapshot.running),
            (self._free_blocks, snapshot.free_blocks),
            (self._num_blocks, snapshot.num_blocks),
        ):
            column[:] = np.where(self._reported, values[places], 0)
        for index in np.flatnonzero(self._reported & (self._sent > 0)).tolist():
            counted = at - float(snapshot.ages[places[index]]) - _ON_THE_WAY
            times = self._times[index]
            while times and times[0] <= counted:
                times.popleft()
            self._sent[index] = len(times)

    def sent(self, rank: int, now: float) -> None:
        """Count a request that is sent to a rank."""
        index = self._index[rank]
        self._open[index] += 1
        self._times[index].append(now)
        self._sent[index] += 1

    def ended(self, rank: int) -> None:
        """Count a request that was sent to a rank and has finished or was aborted."""
        index = self._index[rank]
        self._open[index] -= 1
        # One that came and went between two reports is in neither.
        while self._sent[index] > self._open[index]:
            self._times[index].popleft()
            self._sent[index] -= 1

    def loads(self, now: float) -> RankLoads:
        """Return the loads as far as they are known."""
        known = self._reported & (now - self._heard_at < _SILENCE)
        return RankLoads(
            self._up,
            np.where(known, self._waiting, 0),
            np.where(known, self._running, 0),
            np.where(known, self._sent, self._open),
            np.where(known, self._free_blocks, 0),
            np.where(known, self._num_blocks, 0),
        )

    def choose(self, now: float, cached: NDArray[np.int64] | None = None) -> int | None:
        """Return the rank for a request, None if none is up; see `routing.choose`."""
        if len(self.ranks) == 1:
            return int(self.ranks[0]) if self._up[0] else None
        index = choose(self.loads(now), self._turn, cached)
        self._turn += 1
        return None if index is None else int(self.ranks[index])

    def _forget(self, index: int) -> None:
        self._reported[index] = False
        self._open[index] = self._sent[index] = 0
        self._times[index].clear()
