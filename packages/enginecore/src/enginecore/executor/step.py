"""Step records: the input that the core gives workers, and their output."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchsched import StepPlan
from enginecore.messages import PositionLogprobs, RowSampling
from kvblocks import BlockCopies, TableChanges

NOT_FINITE = -1
"""In the place of a sampled id: the row's logits were NaN or infinite, and nothing could be chosen."""


class SampledTokens(NamedTuple):
    """Tokens that rows have sampled, for the stages of a pipeline that did not sample them; [n] each."""

    rows: NDArray[np.int32]
    positions: NDArray[np.int32]
    ids: NDArray[np.int32]


class StepInput(NamedTuple):
    """One step.

    A worker applies its parts in this order: `sampled`, which may concern rows that are freed; `copies`;
    `plan.freed`; `plan.admitted` with `sampling`; `changes`. Then it runs the plan's rows.
    """

    plan: StepPlan
    sampling: list[RowSampling]
    """Of each row in `plan.admitted`."""
    changes: TableChanges
    """New entries of the block tables."""
    copies: BlockCopies
    """Blocks to swap out and in before the step runs."""
    sampled: SampledTokens | None = None
    """Where there are several stages: what was sampled since the step before."""


class StepOutput(NamedTuple):
    """Results of a step, in the order of the plan's sampling rows."""

    step: int
    tokens: NDArray[np.int32]
    """[k]: ids, or NOT_FINITE."""
    logprobs: dict[int, PositionLogprobs]
    """By index into `tokens`, one position each, for rows that asked."""
    prompt_logprobs: dict[int, PositionLogprobs]
    """By row."""
