"""Who goes first, and who gives way when there is not room for all."""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from batchsched.request import Request


class Line(NamedTuple):
    """Rows that may have to give way, best rank first; arrays of one element a row."""

    ranks: NDArray[np.float64]
    lost: NDArray[np.int32]
    """Computed tokens that the row would give up."""


class Policy(Protocol):
    """An order over requests, running and waiting alike, and the choice of whom to preempt.

    A row is preempted for one that ranks ahead of it, never for one behind.
    """

    quantum: int | None
    """Tokens that a row generates before it is ranked anew, as if its request had just come. It happens only
    while others wait. None if a request keeps its rank to the end."""
    margin: float | None
    """How far a waiting request must rank ahead of rows to take their place. None if rows never make way for
    those that wait."""

    def rank(self, request: Request, turn: int, arrival: float) -> float:
        """The request's place in line: lower goes first, and of equals the one with the lower turn.

        Asked when the request is added, and whenever its quantum is used up; it keeps its place through
        preemption. `turn` counts these occasions, `arrival` is in seconds of the scheduler's clock.
        """
        ...

    def victim(self, line: Line) -> int:
        """Which of these rows gives way: an index into `line`, which has at least one row."""
        ...


class Fcfs:
    """First come, first served; the latest gives way.

    A base for other policies. Rows whose ranks are no further than `tolerance` from the last count as equals,
    and of equals the one gives way that loses least computed work.
    """

    quantum: int | None = None
    margin: float | None = None
    tolerance: float = 0.0

    def rank(self, request: Request, turn: int, arrival: float) -> float:
        return turn

    def victim(self, line: Line) -> int:
        first = int(np.searchsorted(line.ranks, line.ranks[-1] - self.tolerance))
        # The last of those that lose equally little.
        return len(line.ranks) - 1 - int(line.lost[first:][::-1].argmin())


class Priority(Fcfs):
    """The lowest priority number first, less one for every `ageing` seconds since the request came.

    All requests age alike, so the order of two never changes, and need not be looked at again: a request goes
    before any that comes `ageing` seconds later for each level it is worse. That is why nobody starves.

    A waiting request takes the place of rows that are more than half a level worse after ageing. So a row is
    safe from requests one level better that come `ageing / 2` seconds after it, or later; and one that had to
    go never takes its place back from the one it went for.
    """

    margin: float | None = 0.5
    tolerance = 0.5

    def __init__(self, ageing: float = 60.0) -> None:
        if not 0 < ageing < float("inf"):
            raise ValueError(
                f"ageing is {ageing} seconds a level: without an end to it requests would starve"
            )
        self.ageing = ageing

    def rank(self, request: Request, turn: int, arrival: float) -> float:
        return request.priority + arrival / self.ageing


class TimeSlice(Fcfs):
    """Turns of `quantum` generated tokens: a row that used its turn up goes to the back while others wait.

    The first in the queue takes the place of rows that are behind it by then, and of no others: who has a row
    keeps it for a quantum, unless memory runs short. Tokens of the prompt, and what is computed again after a
    preemption, are not counted, so every turn brings a request further.
    """

    margin: float | None = 0.0

    def __init__(self, quantum: int) -> None:
        if quantum < 1:
            raise ValueError(f"quantum is {quantum}: a turn is at least 1 token")
        self.quantum = quantum


class ShortestFirst(Fcfs):
    """The least work first: tokens of the prompt and tokens asked for, less `ageing` a second of waiting.

    Work is what a request may come to, for nobody knows what it will. As with Priority the order of two never
    changes: a request goes before any that comes `work / ageing` seconds later, however short that is. Rows
    do not make way for those that wait; those within a second's ageing of each other count as equals.
    """

    def __init__(self, ageing: float = 100.0) -> None:
        if not 0 < ageing < float("inf"):
            raise ValueError(f"ageing is {ageing} tokens a second: without it long requests would starve")
        self.ageing = ageing
        self.tolerance = ageing

    def rank(self, request: Request, turn: int, arrival: float) -> float:
        return request.tokens.size + request.max_tokens + self.ageing * arrival
