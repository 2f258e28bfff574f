"""Steps of requests that run alone, as each of them may be what ended a core."""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from batchsched import Scheduler, StepPlan
from enginecore.core.in_flight import StepsInFlight
from enginecore.core.request_table import RequestTable


class AloneRequests:
    """Queue of requests that run in steps of their own until they have got a token.

    Every other step is the first one's; those between run the requests beside the queue.
    """

    def __init__(self, scheduler: Scheduler, requests: RequestTable, in_flight: StepsInFlight) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._in_flight = in_flight
        self._handles: deque[int] = deque()
        self._first_is_next = True
        self.planned_alone = False
        """Whether the step that was planned last runs the first request alone."""

    def add(self, handle: int) -> None:
        """Queue a request, which the scheduler holds."""
        self._handles.append(handle)

    def plan(self) -> StepPlan:
        """Plan a step of the first request alone, or of those beside the queue.

        While there is a queue no step is planned beside another: if one ends the core, its requests are the
        only ones in flight.
        """
        self.planned_alone = False
        while self._handles and self._handles[0] not in self._requests:
            self._handles.popleft()
        if not self._handles:
            return self._scheduler.plan()
        if self._in_flight:
            return StepPlan.empty()
        first, rest = self._handles[0], None
        for only in (first, rest) if self._first_is_next else (rest, first):
            plan = self._scheduler.plan(only)
            if len(plan.rows):
                self.planned_alone = only is first
                self._first_is_next = not self.planned_alone
                return plan
        return StepPlan.empty()

    def commit(self, handles: NDArray[np.int64]) -> None:
        """Let the first request run beside others if it is among those that have got a token, [n]."""
        if self._handles and self._handles[0] in handles:
            self._scheduler.release(self._handles.popleft())
