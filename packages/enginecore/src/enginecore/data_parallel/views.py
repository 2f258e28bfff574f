"""Recorded steps of the ranks that a front-end watches."""

from collections import deque
from itertools import islice

from enginecore.messages import WATCHED_STEPS, StepsView


class RankView:
    """The last steps of a rank, and a map of its KV cache's blocks."""

    def __init__(self) -> None:
        self.num_steps = 0
        """Steps told of so far; the newest has this number."""
        self._steps: deque[list[float]] = deque(maxlen=WATCHED_STEPS)
        self.blocks = b""
        """A byte a cell; see `StepsView.blocks`."""
        self.totals = [0, 0, 0, 0]
        """Blocks by state."""
        self.map_number = 0
        """Of the map, counted up when it changes."""

    def update(self, view: StepsView) -> None:
        """Take a view in."""
        self._steps.extend(view.steps.tolist())
        self.num_steps += len(view.steps)
        if view.blocks is not None:
            blocks = view.blocks.tobytes()
            self.map_number += blocks != self.blocks or view.totals != self.totals
            self.blocks, self.totals = blocks, view.totals

    def steps_after(self, number: int) -> list[list[float]]:
        """Return the steps with a higher number, oldest first, as far as they are kept."""
        new = min(self.num_steps - number, len(self._steps))
        return list(islice(self._steps, len(self._steps) - new, None))


class EngineWatch:
    """The ranks' views, kept while somebody watches."""

    def __init__(self) -> None:
        self.watchers = 0
        self.ranks: dict[int, RankView] = {}

    def update(self, rank: int, view: StepsView) -> None:
        """Take a rank's view in, unless it comes after the last watcher has left."""
        if self.watchers:
            self.ranks.setdefault(rank, RankView()).update(view)
