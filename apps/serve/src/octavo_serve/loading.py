"""Progress of ranks that load the model, in words and numbers."""

import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from enginecore import RankLoading

_LEAST_RETRY_SECONDS, _MOST_RETRY_SECONDS = 1, 60
UNKNOWN_RETRY_SECONDS = 5
"""After which to ask again, where nobody knows."""


class LoadProgress(NamedTuple):
    """Progress of the rank that has come the least far, of those that load."""

    phase: str
    percent: int | None
    """Of the tensors; None where none is counted."""
    elapsed_seconds: float
    """Since the rank was started."""
    ranks_loading: int

    def __str__(self) -> str:
        counted = "" if self.percent is None else f", {self.percent} %"
        others = f" (the slowest of {self.ranks_loading} ranks)" if self.ranks_loading > 1 else ""
        return f"{self.phase}{counted}, for {self.elapsed_seconds:.0f} s so far{others}"

    def members(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {**self._asdict(), "elapsed_seconds": round(self.elapsed_seconds, 1)}

    def retry_after(self) -> int:
        """Return the seconds after which to ask again: those that the rest of the weights may take."""
        if not self.percent:
            return UNKNOWN_RETRY_SECONDS
        rest = self.elapsed_seconds * (100 - self.percent) / self.percent
        return min(max(math.ceil(rest), _LEAST_RETRY_SECONDS), _MOST_RETRY_SECONDS)


def load_progress(loading: Mapping[int, RankLoading]) -> LoadProgress | None:
    """Return the progress of the ranks that load, None if none does."""
    if not loading:
        return None
    slowest = min(loading.values(), key=lambda one: (_percent(one) or 0, one.rank))
    elapsed = max(0.0, time.monotonic() - slowest.began)
    return LoadProgress(slowest.progress.phase, _percent(slowest), elapsed, len(loading))


def _percent(rank: RankLoading) -> int | None:
    progress = rank.progress
    return 100 * progress.done // progress.total if progress.total else None
