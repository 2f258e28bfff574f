"""Who goes first, and who gives way when memory is short."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from batchsched.request import Request


class Policy(Protocol):
    """An order over requests, running and waiting alike, and the choice of whom to preempt."""

    def rank(self, request: Request, turn: int, arrival: float) -> float:
        """The request's place in line: lower goes first, and of equals the one added first.

        Asked once, when the request is added; it keeps its place through preemption. `turn` counts the
        requests added, `arrival` is in seconds of the scheduler's clock.
        """
        ...

    def victim(self, line: NDArray[np.intp], needy: int) -> int | None:
        """Which index of `line` is preempted so that `line[needy]` can go on; None if it should wait instead.

        `line` is int [n], the rows that run, in rank order. Waiting is always an answer unless `needy` is 0:
        the rows ahead go on, and give their blocks back when they end.
        """
        ...


class Fcfs:
    """First come, first served; the latest gives way, and never to one that came after it."""

    def rank(self, request: Request, turn: int, arrival: float) -> float:
        return turn

    def victim(self, line: NDArray[np.intp], needy: int) -> int | None:
        last = len(line) - 1
        return last if last > needy else None
