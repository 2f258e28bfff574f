"""Results of a replay: times and counts of each request, and how busy the ranks were."""

import numpy as np
from numpy.typing import NDArray

from simulate.traces import Trace


class Outcome:
    """Filled in by the ranks; arrays of one element a request.

    arrivals, first_token, finished: seconds; NaN where a request was refused.
    prompts, outputs: tokens. cached: prompt tokens that the prefix cache had.
    priorities: classes 0 to `classes - 1`, dealt out in turn; 0 is the most urgent.
    series: (seconds, running, waiting, share of the KV blocks held), one line a moment.
    """

    def __init__(self, trace: Trace, classes: int = 1) -> None:
        size = len(trace)
        self.arrivals = trace.arrivals
        self.prompts = trace.prompts
        self.outputs = trace.outputs
        self.priorities = np.arange(size) % classes
        self.first_token = np.full(size, np.nan)
        self.finished = np.full(size, np.nan)
        self.cached = np.zeros(size, np.int64)
        self.refused = 0
        self.steps = 0
        self.preemptions = 0
        self.copied_out = 0
        self.copied_in = 0
        self.busy_seconds = 0.0
        self.usage_seconds = 0.0
        self.peak_usage = 0.0
        self.series: list[tuple[float, int, int, float]] = []

    def count(self, steps: int, seconds: float, usage: float) -> None:
        """Note steps, the seconds they take together, and the share of KV blocks held at their end."""
        self.steps += steps
        self.busy_seconds += seconds
        self.usage_seconds += usage * seconds
        self.peak_usage = max(self.peak_usage, usage)

    def begin(self, handles: NDArray[np.int64], now: float, cached: NDArray[np.int32]) -> None:
        """Note the first tokens of requests."""
        self.first_token[handles] = now
        self.cached[handles] = cached

    def end(self, handles: NDArray[np.int64], now: float, generated: NDArray[np.int32]) -> None:
        """Note the last tokens of requests."""
        assert (generated == self.outputs[handles]).all(), "a request generates what the trace says"
        self.finished[handles] = now

    @property
    def completed(self) -> NDArray[np.bool_]:
        """Mask of the requests that ran to their end."""
        return ~np.isnan(self.finished)

    @property
    def ttft(self) -> NDArray[np.float64]:
        """Seconds from arrival to the first token."""
        return self.first_token - self.arrivals

    @property
    def tpot(self) -> NDArray[np.float64]:
        """Mean seconds a token after the first; NaN for outputs of one token."""
        after = np.where(self.outputs > 1, self.outputs - 1, np.nan)
        return (self.finished - self.first_token) / after

    @property
    def e2e(self) -> NDArray[np.float64]:
        """Seconds from arrival to the last token."""
        return self.finished - self.arrivals
