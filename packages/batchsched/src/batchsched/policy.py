"""Policies: the order of requests, how rows are preempted, and which rows when there is not room for all."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from batchsched.memory import Memory, SwapMemory
from batchsched.records import Request, StepBatch
from batchsched.running import RunningRows


class Candidates(NamedTuple):
    """Rows that may be preempted, best rank first; arrays of one element a row."""

    ranks: NDArray[np.float64]
    computed: NDArray[np.int32]
    """Computed tokens, which the row would lose."""


class Policy(Protocol):
    """An order over requests, running and waiting alike, and the choice of rows to preempt.

    A row is preempted for one that ranks before it, never for one after it.
    """

    quantum: int | None
    """Tokens that a row generates before it is ranked again, as if its request had just arrived. It happens
    only while others wait. None if a request keeps its rank to the end."""
    margin: float | None
    """How much lower a waiting request must rank than the rows preempted for it. None if rows are never
    preempted for waiting requests."""

    def rank(self, request: Request, arrival_index: int, arrival: float) -> float:
        """Return the request's rank: lower goes first, and of equals the one with the lower arrival index.

        Called when the request is added, and whenever its quantum is used up; the rank is kept through
        preemption. `arrival_index` counts these calls, `arrival` is in seconds of the scheduler's clock.
        """
        ...

    def victim(self, candidates: Candidates) -> int:
        """Choose the row to preempt: an index into `candidates`, of which there is at least one."""
        ...


class Fcfs:
    """First come, first served; the latest is preempted.

    A base for other policies. Rows whose ranks are no further than `tolerance` from the last count as equals,
    and of equals the one that loses least computed work is preempted.
    """

    quantum: int | None = None
    margin: float | None = None
    tolerance: float = 0.0

    def rank(self, request: Request, arrival_index: int, arrival: float) -> float:
        return arrival

    def victim(self, candidates: Candidates) -> int:
        ranks = candidates.ranks
        first = int(np.searchsorted(ranks, ranks[-1] - self.tolerance))
        # The last of those that lose equally little.
        return len(ranks) - 1 - int(candidates.computed[first:][::-1].argmin())


class Priority(Fcfs):
    """The lowest priority number first, less one for every `ageing` seconds since the request arrived.

    All requests age alike, so the order of two never changes and ranks stay valid: a request goes before any
    that arrives `ageing` seconds later for each level it is worse. So no request starves.

    Rows that are more than half a level worse after ageing are preempted for a waiting request. So a row is
    safe from requests one level better that arrive `ageing / 2` seconds after it, or later; and a preempted
    request never preempts the one it was preempted for.
    """

    margin: float | None = 0.5
    tolerance = 0.5

    def __init__(self, ageing: float = 60.0) -> None:
        if not 0 < ageing < float("inf"):
            raise ValueError(
                f"ageing is {ageing} seconds a level: without an end to it requests would starve"
            )
        self.ageing = ageing

    def rank(self, request: Request, arrival_index: int, arrival: float) -> float:
        return request.priority + arrival / self.ageing


class TimeSlice(Fcfs):
    """Round robin: a row that generated `quantum` tokens goes to the back of the queue while others wait.

    The first waiting request preempts rows that have gone behind it, and no others: a row runs for a quantum
    unless memory runs short. Tokens of the prompt, and those computed again after a preemption, are not
    counted, so every quantum brings a request further. Requests queue up in the order in which they are
    added, whenever they arrived.
    """

    margin: float | None = 0.0

    def __init__(self, quantum: int) -> None:
        if quantum < 1:
            raise ValueError(f"quantum is {quantum}: it is at least 1 token")
        self.quantum = quantum

    def rank(self, request: Request, arrival_index: int, arrival: float) -> float:
        return arrival_index


class ShortestFirst(Fcfs):
    """The least work first: tokens of the prompt plus `max_tokens`, less `ageing` a second of waiting.

    The work is an upper bound, as a stop id may end the request earlier. As with Priority the order of two
    never changes: a request goes before any that arrives `work / ageing` seconds later, however short that
    is. Rows are not preempted for waiting requests; ranks within a second's ageing count as equals.
    """

    def __init__(self, ageing: float = 100.0) -> None:
        if not 0 < ageing < float("inf"):
            raise ValueError(f"ageing is {ageing} tokens a second: without it long requests would starve")
        self.ageing = ageing
        self.tolerance = ageing

    def rank(self, request: Request, arrival_index: int, arrival: float) -> float:
        return request.prompt.size + request.max_tokens + self.ageing * arrival


class Preemption(Protocol):
    """A preemption mode: how a preempted row frees its blocks. It resumes with `Memory.allocate`."""

    def preempt(self, memory: Memory, row: int) -> None:
        """Free the row's blocks."""
        ...

    def discard(self, memory: Memory, prefix: Any) -> None:
        """Drop whatever was kept for a preempted request, which ends without resuming."""
        ...


class Recompute:
    """Keys and values are dropped and computed again, except for those still in the prefix cache."""

    def preempt(self, memory: Memory, row: int) -> None:
        memory.free(row)

    def discard(self, memory: Memory, prefix: Any) -> None:
        """Nothing was kept."""


class Swap:
    """Keys and values are swapped out to the host tier of a `SwapMemory`, or dropped when that is full."""

    def preempt(self, memory: Memory, row: int) -> None:
        if not cast(SwapMemory, memory).swap_out(row):
            memory.free(row)

    def discard(self, memory: Memory, prefix: Any) -> None:
        cast(SwapMemory, memory).discard(prefix)


def preempt_for_shortage(
    batch: StepBatch,
    rows: RunningRows,
    memory: Memory,
    policy: Policy,
    preempt: Callable[[NDArray[np.intp]], None],
) -> StepBatch:
    """Preempt rows until the blocks suffice, and return the part of the batch that can run now.

    A row is preempted only for one before it in the running queue; the last one waits instead. Blocks of
    draining rows count as free here: nobody is preempted while they are enough. Rows that need a block and
    cannot have it yet skip this step, and so do those after them that need one.
    """
    while True:
        fitting = batch.num_fitting(memory, memory.num_free + _blocks_draining(rows, memory.block_size))
        if fitting == batch.rows.size:
            break
        after = rows.queue[int(np.flatnonzero(rows.queue == batch.rows[fitting])[0]) + 1 :]
        if after.size == 0:
            break
        victim = policy.victim(_candidates(rows, after))
        preempt(after[victim : victim + 1])
        batch = batch.only(rows.is_running[batch.rows])
    runs = _blocks(batch.starts, memory.block_size) == _blocks(batch.ends, memory.block_size)
    runs[: batch.num_fitting(memory, memory.num_free)] = True
    return batch.only(runs)


def victims_for_waiting(
    candidates: NDArray[np.intp],
    rows: RunningRows,
    memory: Memory,
    policy: Policy,
    has_room: Callable[[NDArray[np.intp], int], bool],
) -> NDArray[np.intp]:
    """Choose among the candidates (intp [n], in rank order) the rows to preempt for a waiting request.

    `has_room(victims, blocks)` says whether the request can be admitted once the rows `victims` are preempted
    and `blocks` are freed. No row is chosen if there is room already, or would be none with all of them
    preempted. Blocks of draining rows are counted as freed.
    """
    none = candidates[:0]
    blocks = _blocks(rows.planned[candidates], memory.block_size)
    freed = _blocks_draining(rows, memory.block_size)
    if has_room(none, freed) or not has_room(candidates, freed + int(blocks.sum())):
        return none
    staying = np.arange(candidates.size)
    victims = none
    while not has_room(victims, freed):
        victim = policy.victim(_candidates(rows, candidates[staying]))
        freed += int(blocks[staying[victim]])
        staying = np.delete(staying, victim)
        victims = np.delete(candidates, staying)
    return victims


def _candidates(rows: RunningRows, which: NDArray[np.intp]) -> Candidates:
    return Candidates(rows.rank[which], rows.planned[which])


def _blocks_draining(rows: RunningRows, block_size: int) -> int:
    """Return the number of blocks that draining rows hold. Fewer are freed if others share them."""
    return int(_blocks(rows.planned[rows.draining], block_size).sum())


def _blocks(lengths: NDArray[np.int32], block_size: int) -> NDArray[np.int32]:
    return -(-lengths // block_size)
