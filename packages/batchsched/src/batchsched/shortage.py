"""What runs, and who gives way, when a step needs more blocks than are free."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from batchsched.batch import Batch
from batchsched.memory import Memory
from batchsched.policy import Policy
from batchsched.rows import Rows


def relieve(
    batch: Batch,
    rows: Rows,
    memory: Memory,
    policy: Policy,
    preempt: Callable[[NDArray[np.intp]], None],
) -> Batch:
    """The part of the batch that can run now, once `preempt` was called for those the policy picked.

    Blocks of departing rows count as good as free here: nobody is preempted for want of them. Rows that need
    a block and cannot have it yet sit this step out, and so do those behind them that need one.
    """
    while True:
        within_reach = memory.num_free + _blocks_coming(rows, memory.block_size)
        fitting = batch.num_fitting(memory, within_reach)
        if fitting == batch.rows.size:
            break
        needy = int(np.flatnonzero(rows.line == batch.rows[fitting])[0])
        victim = policy.victim(rows.line, needy)
        if victim is None:
            break
        preempt(rows.line[victim : victim + 1])
        batch = batch.only(rows.in_line[batch.rows])
    runs = _blocks(batch.starts, memory.block_size) == _blocks(batch.ends, memory.block_size)
    runs[: batch.num_fitting(memory, memory.num_free)] = True
    return batch.only(runs)


def _blocks_coming(rows: Rows, block_size: int) -> int:
    """Blocks that departing rows hold. Fewer come free if others share them."""
    return int(_blocks(rows.planned[rows.departing], block_size).sum())


def _blocks(lengths: NDArray[np.int32], block_size: int) -> NDArray[np.int32]:
    return -(-lengths // block_size)
