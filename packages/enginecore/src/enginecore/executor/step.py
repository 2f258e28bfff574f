"""Step records: the input that the core gives workers, and their output."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchsched import StepPlan
from enginecore.messages import NO_TOKENS, PooledRows, PositionLogprobs, RowSampling
from kvblocks import BlockCopies, TableChanges

NOT_FINITE = -1
"""In the place of a sampled id: the row's logits were NaN or infinite, and nothing could be chosen."""


class SampledTokens(NamedTuple):
    """Tokens that rows have sampled, for the stages of a pipeline that did not sample them; [n] each."""

    rows: NDArray[np.int32]
    positions: NDArray[np.int32]
    ids: NDArray[np.int32]

    @classmethod
    def of(cls, plan: StepPlan, output: "StepOutput") -> "SampledTokens":
        """Return what the step of `plan` has sampled."""
        rows = plan.rows[plan.samples]
        positions = (plan.starts + plan.counts - plan.num_drafts)[plan.samples]
        if output.counts is not None:
            before = np.cumsum(output.counts) - output.counts
            offsets = np.arange(len(output.tokens)) - np.repeat(before, output.counts)
            rows = np.repeat(rows, output.counts)
            positions = (np.repeat(positions, output.counts) + offsets).astype(np.int32)
        return cls(rows, positions, output.tokens)

    @classmethod
    def join(cls, parts: Sequence["SampledTokens"]) -> "SampledTokens":
        """Return those of one or more steps, one after the other."""
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


class StepInput(NamedTuple):
    """One step.

    A worker applies its parts in this order: `sampled`, which may concern rows that are freed; `copies`;
    `plan.freed`; `plan.admitted` with `sampling`; `changes`. Then it runs the plan's rows. Without any, it
    runs its experts on the tokens of other engines.
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
    unfinished: bool | None = None
    """On a step that asks all engines in lockstep: whether this one has unfinished requests."""


class StepOutput(NamedTuple):
    """Results of a step, in the order of the plan's sampling rows."""

    step: int
    tokens: NDArray[np.int32]
    """[k]: ids, or NOT_FINITE; several of a row one after another where drafts were accepted; 0 for rows that
    are pooled."""
    logprobs: dict[int, PositionLogprobs]
    """By index into `tokens`, one position each, for rows that asked."""
    prompt_logprobs: dict[int, PositionLogprobs]
    """By row."""
    unfinished: bool | None = None
    """Of a step that asked: whether any engine has unfinished requests."""
    pooled: PooledRows | None = None
    """By row."""
    errors: Mapping[int, str] = {}
    """By index into `tokens`, why logits processors left nothing to choose from; of rows that have some."""
    counts: NDArray[np.int32] | None = None
    """Tokens of each sampling row, of a step with drafts; None for one each."""


def empty_step(unfinished: bool | None) -> StepInput:
    """Return a step that runs no row, for an engine in lockstep that has nothing else to run."""
    changes = TableChanges(NO_TOKENS, NO_TOKENS, NO_TOKENS)
    return StepInput(StepPlan.empty(), [], changes, BlockCopies(), unfinished=unfinished)
