"""Who gives way when there is not room for all."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from batchsched.batch import Batch
from batchsched.memory import Memory
from batchsched.policy import Policy
from batchsched.rows import Rows

Preempt = Callable[[NDArray[np.intp]], None]


def relieve(batch: Batch, rows: Rows, memory: Memory, policy: Policy, preempt: Preempt) -> Batch:
    """The part of the batch that can run now, once `preempt` was called for those the policy picked.

    A row gives way to one ahead of it in line; the last in line waits instead. Blocks of departing rows count
    as good as free here: nobody is preempted for want of them. Rows that need a block and cannot have it yet
    sit this step out, and so do those behind them that need one.
    """
    while True:
        within_reach = memory.num_free + _blocks_coming(rows, memory.block_size)
        fitting = batch.num_fitting(memory, within_reach)
        if fitting == batch.rows.size:
            break
        behind = rows.line[int(np.flatnonzero(rows.line == batch.rows[fitting])[0]) + 1 :]
        if behind.size == 0:
            break
        victim = policy.victim(rows.standing(behind))
        preempt(behind[victim : victim + 1])
        batch = batch.only(rows.in_line[batch.rows])
    runs = _blocks(batch.starts, memory.block_size) == _blocks(batch.ends, memory.block_size)
    runs[: batch.num_fitting(memory, memory.num_free)] = True
    return batch.only(runs)


def who_makes_way(
    candidates: NDArray[np.intp],
    rows: Rows,
    memory: Memory,
    policy: Policy,
    has_room: Callable[[NDArray[np.intp], int], bool],
) -> NDArray[np.intp]:
    """The candidates (intp [n], in rank order) to preempt so that a waiting request has room.

    `has_room(gone, blocks)` says whether it has once the rows `gone` have left and `blocks` have come free.
    None go if it has room as it is, or would have none even without all of them. Blocks of rows that depart
    already are counted as free.
    """
    none = candidates[:0]
    blocks = _blocks(rows.planned[candidates], memory.block_size)
    coming = _blocks_coming(rows, memory.block_size)
    if has_room(none, coming) or not has_room(candidates, coming + int(blocks.sum())):
        return none
    staying = np.arange(candidates.size)
    gone = none
    while not has_room(gone, coming):
        victim = policy.victim(rows.standing(candidates[staying]))
        coming += int(blocks[staying[victim]])
        staying = np.delete(staying, victim)
        gone = np.delete(candidates, staying)
    return gone


def _blocks_coming(rows: Rows, block_size: int) -> int:
    """Blocks that departing rows hold. Fewer come free if others share them."""
    return int(_blocks(rows.planned[rows.departing], block_size).sum())


def _blocks(lengths: NDArray[np.int32], block_size: int) -> NDArray[np.int32]:
    return -(-lengths // block_size)
