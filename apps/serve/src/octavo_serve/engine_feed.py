"""The state of the engine as the live page is sent it, and percentiles of latencies over the last minute."""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import enginecore

if TYPE_CHECKING:
    from enginecore import EngineWatch
    from octavo_serve.state import ServerState

SECONDS_BETWEEN_FRAMES = 0.5

_WINDOW_SECONDS = 60
_SECONDS_BETWEEN_READS = 2
_PERCENTS = (50, 90, 99)

Buckets = Sequence[tuple[float, int]]
"""Upper bounds, the last infinite, and how many values there were up to each and above the one before."""


def percentile(buckets: Buckets, percent: float) -> float | None:
    """Return a percentile by linear interpolation inside its bucket; None without values.

    One in the last bucket, which has no upper bound, is said to be the bound below.
    """
    total = sum(count for _, count in buckets)
    if not total:
        return None
    wanted, below, lower = total * percent / 100, 0, 0.0
    for bound, count in buckets:
        if count and below + count >= wanted:
            return lower if math.isinf(bound) else lower + (bound - lower) * (wanted - below) / count
        below += count
        lower = bound if not math.isinf(bound) else lower
    return lower


class Latencies:
    """Percentiles of what was counted in the last minute, from counts that only grow."""

    def __init__(self) -> None:
        self._reads: deque[tuple[float, Mapping[str, Buckets]]] = deque()

    def is_due(self, now: float) -> bool:
        """Whether the counts are to be read again."""
        return not self._reads or now >= self._reads[-1][0] + _SECONDS_BETWEEN_READS

    def add(self, now: float, counts: Mapping[str, Buckets]) -> None:
        """Take in the counts of `now`, in seconds of the monotonic clock."""
        self._reads.append((now, counts))
        while len(self._reads) > 1 and self._reads[1][0] <= now - _WINDOW_SECONDS:
            self._reads.popleft()

    def summary(self) -> dict[str, dict[str, float | None]]:
        """Return count and percentiles, in seconds, of each latency in the window."""
        if not self._reads:
            return {}
        first, last = self._reads[0][1], self._reads[-1][1]
        found = {}
        for name, counts in last.items():
            before = dict(first.get(name, ()))
            grown = [(bound, count - before.get(bound, 0)) for bound, count in counts]
            found[name] = {
                "count": sum(count for _, count in grown),
                **{f"p{percent}": percentile(grown, percent) for percent in _PERCENTS},
            }
        return found


class EngineFeed:
    """Makes one watcher's frames: what it has been sent already is not sent again."""

    def __init__(self, server: "ServerState", watch: "EngineWatch") -> None:
        self._server = server
        self._watch = watch
        self._steps: dict[int, int] = {}
        """Number of the newest step sent, by rank."""
        self._maps: dict[int, int] = {}
        """Number of the map sent, by rank."""
        self._latencies = Latencies()

    def frame(self) -> dict[str, Any]:
        """Return the members of a frame; counters count from the server's start, seconds are monotonic."""
        engine, now = self._server.engine, time.monotonic()
        progress = self._server.progress
        if self._latencies.is_due(now):
            self._latencies.add(now, engine.metrics.latencies())
        down = engine.ranks_down
        return {
            "time": now,
            "trouble": self._server.trouble,
            "loading": None if progress is None else progress.members(),
            "version": enginecore.__version__,
            "models": self._server.names,
            "max_model_len": None if self._server.refusal else self._server.max_model_len,
            "latencies": self._latencies.summary(),
            "ranks": [
                {
                    "rank": rank,
                    "down": down.get(rank),
                    "running": stats.running,
                    "waiting": stats.waiting,
                    "free_blocks": stats.free_blocks,
                    "num_blocks": stats.num_blocks,
                    "preemptions": stats.preemptions,
                    "prefix_queries": stats.prefix_queries,
                    "prefix_hits": stats.prefix_hits,
                    "prompt_tokens": stats.prompt_tokens,
                    "generation_tokens": stats.generation_tokens,
                    **self._view(rank),
                }
                for rank, stats in engine.rank_stats().items()
            ],
        }

    def _view(self, rank: int) -> dict[str, Any]:
        view = self._watch.ranks.get(rank)
        if view is None:
            return {}
        steps = view.steps_after(self._steps.get(rank, 0))
        self._steps[rank] = view.num_steps
        found: dict[str, Any] = {
            "num_steps": view.num_steps,
            "steps": [[round(value, 6) for value in step] for step in steps],
        }
        if self._maps.get(rank) != view.map_number:
            self._maps[rank] = view.map_number
            # A digit a cell: states are 0 to 3.
            found["blocks"] = view.blocks.translate(_DIGITS).decode()
            found["block_totals"] = view.totals
        return found


_DIGITS = bytes(48 + state if state < 4 else 63 for state in range(256))
