"""The steps that an executor has been given and not answered."""

import time
from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchsched import StepPlan
from enginecore.core.board import Board


class _Step(NamedTuple):
    plan: StepPlan
    handles: NDArray[np.int64]
    """[n]: of the plan's rows."""
    started: float
    """Seconds of the monotonic clock."""


class StepsInFlight:
    """Queue of steps in flight, oldest first, which other processes see on `board`."""

    def __init__(self, board: Board | None) -> None:
        self._board = board
        self._steps: deque[_Step] = deque()
        self.num_ended = 0
        self.last_seconds = 0.0
        """Duration of the last step that has ended."""

    def __len__(self) -> int:
        """Steps in flight."""
        return len(self._steps)

    def begin(self, plan: StepPlan, handles: NDArray[np.int64], *, alone: bool) -> None:
        """Add a step that is about to be submitted, with the requests of its rows, [n].

        `alone` says that it is one of a request that runs alone.
        """
        self._steps.append(_Step(plan, handles, time.monotonic()))
        if self._board is not None:
            self._board.begin_step([step.handles for step in self._steps], plan.num_tokens, alone)

    def end(self) -> StepPlan:
        """Remove the oldest step, which has ended, and return its plan."""
        step = self._steps.popleft()
        self.num_ended += 1
        self.last_seconds = time.monotonic() - step.started
        if self._board is not None:
            handles = [other.handles for other in self._steps]
            self._board.end_step(handles, step.plan.num_tokens, self.last_seconds)
        return step.plan

    def clear(self) -> None:
        """Forget all steps, whose executor has ended; the board shows them on."""
        self._steps.clear()
