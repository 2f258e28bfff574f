"""The step log: the make-up of the last steps and where their time went, recorded while somebody watches."""

import time
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from batchsched import StepPlan
from enginecore.messages import STEP_COLUMNS, WATCHED_STEPS, StepsView

IDLE, PLAN, RUN, DELIVER = range(4)
"""Phases of the core's loop, in the order of the last columns of STEP_COLUMNS."""

MOST_CELLS = 2048
"""Of a map of blocks."""


class StepLog:
    """Adds up the loop's time by phase, and keeps a row of STEP_COLUMNS for each of the last steps."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last = clock()
        self._seconds = [0.0] * 4
        self._tokens: tuple[int, int, int] | None = None
        """Of the step that was run and is not recorded: of prompts, generated, rows."""
        self._rows: deque[tuple[float, ...]] = deque(maxlen=WATCHED_STEPS)

    def spent(self, phase: int) -> None:
        """Count the time since the last call to `phase`."""
        now = self._clock()
        self._seconds[phase] += now - self._last
        self._last = now

    def ran(self, plan: StepPlan) -> None:
        """Note a step whose results are there."""
        beside_drafts = plan.counts - plan.num_drafts if plan.num_drafts.size else plan.counts
        prefill = int(plan.counts[(beside_drafts > 1) | ~plan.samples].sum())
        self._tokens = (prefill, plan.num_tokens - prefill, len(plan.rows))

    def record(self) -> None:
        """Keep the step that was run, with the time since the one before."""
        if self._tokens is None:
            return
        self._rows.append((*self._tokens, *self._seconds))
        self._tokens = None
        self._seconds = [0.0] * 4

    def drain(self) -> NDArray[np.float32]:
        """Return the rows since the last call, float32 [n, STEP_COLUMNS], oldest first."""
        rows = np.array(self._rows, np.float32).reshape(-1, len(STEP_COLUMNS))
        self._rows.clear()
        return rows

    def view(self, states: NDArray[np.int8] | None) -> StepsView:
        """Return the rows since the last call, and a map of the KV cache's blocks if `states` has theirs."""
        view = StepsView(self.drain())
        if states is not None:
            view.blocks = block_map(states)
            view.totals = np.bincount(states, minlength=4).tolist()
        return view


def block_map(states: NDArray[np.int8]) -> NDArray[np.int8]:
    """Return `states` (int8 [blocks], 0 to 3) in at most MOST_CELLS cells, int8 [cells].

    Where there are more blocks, a cell stands for as many consecutive ones each, the last perhaps for fewer,
    and has the state that most of them have, the higher one of two.
    """
    size = -(-states.size // MOST_CELLS)
    if size <= 1:
        return states
    cells = -(-states.size // size)
    padded = np.full(cells * size, -1, np.int8)
    padded[: states.size] = states
    grouped = padded.reshape(cells, size)
    counts = np.stack([(grouped == state).sum(axis=1) for state in (3, 2, 1, 0)])
    return (3 - counts.argmax(axis=0)).astype(np.int8)
