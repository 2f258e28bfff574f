"""Data-parallel ranks and the front-end before them, driven by events: arrivals, and ends of steps."""

import heapq
from itertools import count

import numpy as np
from numpy.typing import NDArray

from batchsched import RequestRefused
from enginecore.data_parallel.routing import RankLoads, choose
from kvblocks import PrefixHasher
from simulate.outcome import Outcome
from simulate.rank import Rank, Setup
from simulate.traces import Trace

_MOMENTS = 500


class Cluster:
    """`ranks` equal ranks that serve one trace.

    Steps that end when a request arrives have ended before it arrives. A rank that is idle starts at once.

    affinity: whether the router weighs what ranks have cached, and not load alone; it knows that at once.
    report_interval: seconds between the ranks' reports; 0: their loads are known at once.
    classes: priorities are 0 to `classes - 1`, dealt out in turn.
    """

    def __init__(
        self,
        trace: Trace,
        setup: Setup,
        *,
        ranks: int = 1,
        affinity: bool = False,
        report_interval: float = 0.05,
        classes: int = 1,
    ) -> None:
        self._trace = trace
        self._affinity = affinity
        self._now = 0.0
        self._outcome = Outcome(trace, classes)
        self._ranks = [Rank(setup, self._outcome, lambda: self._now) for _ in range(ranks)]
        # Ranks whose step is running, by its end.
        self._ends: list[tuple[float, int, Rank]] = []
        self._order = count()
        self._next_moment = 0.0
        self._report_interval = report_interval
        self._next_report = 0.0
        self._loads = self._read_loads()

    def replay(self) -> Outcome:
        """Run until the last request has ended."""
        for index, arrival in enumerate(self._trace.arrivals.tolist()):
            self._run_steps(until=arrival)
            self._report(arrival)
            self._now = arrival
            self._arrive(index)
        self._run_steps(until=np.inf)
        self._outcome.preemptions = sum(rank.scheduler.load().preemptions for rank in self._ranks)
        return self._outcome

    def _arrive(self, index: int) -> None:
        tokens = self._trace.tokens(index)
        chosen = choose(self._loads, index, self._cached_tokens(tokens) if self._affinity else None)
        assert chosen is not None, "all ranks are up"
        rank = self._ranks[chosen]
        try:
            rank.add(index, tokens, int(self._trace.outputs[index]), int(self._outcome.priorities[index]))
        except RequestRefused:
            self._outcome.refused += 1
            return
        self._loads.sent[chosen] += 1
        if rank.idle:
            self._start(rank, until=self._now)

    def _cached_tokens(self, tokens: NDArray[np.int32]) -> NDArray[np.int64]:
        """Leading tokens of the prompt that each rank has cached, int64 [ranks]."""
        # Keys are the same in every memory.
        keys = PrefixHasher(self._ranks[0].memory.block_size).extend(tokens)
        return np.array([rank.cached_tokens(keys) for rank in self._ranks])

    def _report(self, now: float) -> None:
        """Take the loads as they have been since the last event, if reports were due before `now`."""
        if now >= self._next_report:
            self._loads = self._read_loads()
            interval = self._report_interval
            self._next_report = now + interval - now % interval if interval else now

    def _read_loads(self) -> RankLoads:
        loads = [rank.scheduler.load() for rank in self._ranks]
        size = len(loads)
        return RankLoads(
            up=np.ones(size, np.bool_),
            waiting=np.array([load.waiting for load in loads]),
            running=np.array([load.running for load in loads]),
            sent=np.zeros(size, np.int64),
            free_blocks=np.array([rank.memory.num_free for rank in self._ranks]),
            num_blocks=np.array([rank.memory.num_blocks for rank in self._ranks]),
        )

    def _run_steps(self, until: float) -> None:
        """Run every step that ends by then."""
        while self._ends and self._ends[0][0] <= until:
            self._report(self._ends[0][0])
            self._now, _, rank = heapq.heappop(self._ends)
            rank.finish(self._now)
            if self._now >= self._next_moment:
                self._note_moment()
            self._start(rank, until)

    def _start(self, rank: Rank, until: float) -> None:
        seconds = rank.start(until - self._now)
        if seconds is not None:
            heapq.heappush(self._ends, (self._now + seconds, next(self._order), rank))

    def _note_moment(self) -> None:
        loads = [rank.scheduler.load() for rank in self._ranks]
        running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)
        usage = sum(load.kv_usage for load in loads) / len(loads)
        self._outcome.series.append((self._now, running, waiting, usage))
        self._next_moment = self._now + float(self._trace.arrivals[-1]) / _MOMENTS
