"""Steps as the core would give them to a worker."""

import numpy as np

from batchsched import StepPlan
from enginecore.executor.step import StepInput
from kvblocks import BlockCopies, CopyList, TableChanges

NO_COPIES = BlockCopies(*[CopyList(*[np.empty(0, np.int32)] * 2)] * 2)


def ids(*values: int) -> np.ndarray:
    """Return an int32 array."""
    return np.array(values, np.int32)


def decode_only(rows: int) -> StepInput:
    """Return a step in which each of `rows` rows decodes a token, and every 16th gets a block."""
    every = np.arange(rows, dtype=np.int32)
    few = every[::16]
    ones = np.ones(rows, np.int32)
    plan = StepPlan(7, every, every + 500, ones, ones > 0, [], ids(), ids(), ids())
    return StepInput(plan, [], TableChanges(few, few, few), NO_COPIES)
