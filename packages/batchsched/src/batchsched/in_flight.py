"""Steps in flight: planned, with results yet to be committed; and the microbatches of a pipeline."""

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchsched.records import StepBatch, StepMismatch, StepResult
from batchsched.running import RunningRows


class InFlightStep(NamedTuple):
    """A step in flight: its rows (intp [n]), the position after each (int32 [n]), and the rows that sample.

    `sampling` is intp [k]; `num_drafts` is int32 [k], None if no row may have drafts.
    """

    step: int
    rows: NDArray[np.intp]
    ends: NDArray[np.int32]
    sampling: NDArray[np.intp]
    num_drafts: NDArray[np.int32] | None


class SampledStep(NamedTuple):
    """A step and the tokens it sampled (int32), of which each sampling row has `counts` (int32 [k]).

    `counts` is None where every row has one and no row may have drafts.
    """

    step: InFlightStep
    tokens: NDArray[np.int32]
    counts: NDArray[np.int32] | None


class InFlightSteps:
    """A queue of steps, numbered as they are planned and committed in the same order."""

    def __init__(self) -> None:
        self._steps: deque[InFlightStep] = deque()
        self.last_planned = 0
        self.last_committed = 0

    def __len__(self) -> int:
        return len(self._steps)

    def push(
        self, batch: StepBatch, samples: NDArray[np.bool_], num_drafts: NDArray[np.int32] | None
    ) -> None:
        """Number and add a step. `num_drafts` is int32 [n], or None if no row may have drafts."""
        self.last_planned += 1
        drafts = None if num_drafts is None else num_drafts[samples]
        self._steps.append(
            InFlightStep(self.last_planned, batch.rows, batch.ends, batch.rows[samples], drafts)
        )

    def pop(self, result: StepResult) -> SampledStep:
        """Remove the oldest step and return it with its tokens.

        Raises StepMismatch, with nothing changed, if `result` is not that step's.
        """
        if not self._steps:
            raise StepMismatch(f"step {result.step} has a result, and no step is in flight")
        step = self._steps[0]
        if result.step != step.step:
            raise StepMismatch(f"step {result.step} has a result, and step {step.step} comes first")
        tokens = np.asarray(result.tokens, np.int32)
        counts = _sampled_counts(step, result)
        size = step.sampling.size if counts is None else int(counts.sum())
        if tokens.shape != (size,):
            raise StepMismatch(
                f"step {step.step} samples {size} tokens, and its result has {list(tokens.shape)}"
            )
        self.last_committed = step.step
        return SampledStep(self._steps.popleft(), tokens, counts)

    def pick_microbatch(
        self, rows: RunningRows, queue: NDArray[np.intp], counts: NDArray[np.int32], stages: int
    ) -> NDArray[np.bool_]:
        """Pick the rows of the next pipeline microbatch from `queue`, the running rows not on hold; bool [n].

        Each row has `counts` tokens left to run. One whose newest token is in flight is left out, since the
        first stage could not read it. Decoding rows are spread in queue order: each of `stages` steps takes
        an equal share, and as many of them as there are rows left over take one more. Chunks of a prompt
        depend on no sampled token, and may run in every step.
        """
        decoding = counts <= 1
        ready = decoding & (rows.expected[queue] == rows.num_tokens[queue])
        share, remainder = divmod(int(np.count_nonzero(decoding)), stages)
        if remainder:
            spread = rows.is_running & ~rows.is_held
            sizes = (np.count_nonzero(spread[step.sampling]) for step in self._steps)
            share += sum(size > share for size in sizes) < remainder
        return ~decoding | (ready & (np.cumsum(ready) <= share))


def _sampled_counts(step: InFlightStep, result: StepResult) -> NDArray[np.int32] | None:
    """Return the number of tokens of each sampling row, or None if it is 1 and no row may have drafts."""
    if result.counts is None:
        return None if step.num_drafts is None else np.ones(step.sampling.size, np.int32)
    counts = np.asarray(result.counts, np.int32)
    if counts.shape != step.sampling.shape:
        raise StepMismatch(
            f"step {step.step} has {step.sampling.size} sampling rows, and its result counts for "
            f"{list(counts.shape)}"
        )
    most = 1 if step.num_drafts is None else 1 + step.num_drafts
    wrong = np.flatnonzero((counts < 1) | (counts > most))
    if wrong.size:
        raise StepMismatch(
            f"the rows {step.sampling[wrong].tolist()} of step {step.step} have {counts[wrong].tolist()} "
            "tokens: it is 1 each, and at most 1 more for each draft"
        )
    return None if step.num_drafts is None else counts
