"""Pooling of hidden states, for rows that want a vector in the place of tokens."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from batchsched import StepPlan
from enginecore.messages import PooledRows
from enginecore.pooling_params import Pooling
from enginecore.worker.runner.inputs import ModelInputs
from enginecore.worker.upload import upload_integers

_KINDS: dict[Pooling | None, int] = {None: 0, "last": 1, "mean": 2}


class PoolingColumn:
    """The pooling of each row, [max_rows]; rows are set when they are admitted and stay until freed.

    A step's part of a vector is given out at once and nothing is kept here: a row that is preempted, swapped
    out or moved to another rank takes nothing along.
    """

    def __init__(self, max_rows: int) -> None:
        self._kinds = np.zeros(max_rows, np.int8)
        self.num_rows = 0
        """Rows that are pooled; with none, steps need not ask."""

    def set(self, row: int, pooling: Pooling | None) -> None:
        """Fill a row that is admitted."""
        self._kinds[row] = _KINDS[pooling]
        self.num_rows += pooling is not None

    def free(self, rows: Iterable[int]) -> None:
        """Forget rows that ended or were preempted."""
        for row in rows:
            self.num_rows -= bool(self._kinds[row])
            self._kinds[row] = 0

    def has(self, rows: np.ndarray) -> np.ndarray:
        """Return which of `rows` int[n] are pooled, bool[n]."""
        return self._kinds[rows] > 0

    def pool(self, plan: StepPlan, inputs: ModelInputs, hidden: Tensor) -> "PendingPooled | None":
        """Return what the step adds to vectors, by row; None where it adds nothing.

        `hidden` [tokens, hidden] is in the batch's order. Nothing is read back from the device here.
        """
        order = inputs.order
        kinds = self._kinds[plan.rows[order]]
        picked = np.flatnonzero((kinds == 2) | ((kinds == 1) & plan.samples[order]))
        if not len(picked):
            return None
        mean = kinds[picked] == 2
        ends = inputs.query_starts[picked + 1]
        # One token for `last`, all for `mean`: either way the sum over a run of tokens.
        counts = np.where(mean, plan.counts[order][picked], 1)
        vectors = _sums(hidden, ends - counts, counts)
        where = order[picked]
        return PendingPooled(plan.rows[where], plan.starts[where], plan.counts[where], vectors)


class PendingPooled:
    """Parts of vectors on their way to the host."""

    def __init__(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, vectors: Tensor) -> None:
        """`vectors` is [k, hidden], the others int[k]."""
        self._columns = rows.astype(np.int64), starts.astype(np.int32), counts.astype(np.int32)
        self._vectors = vectors.to("cpu", torch.float32, non_blocking=True)

    def result(self) -> PooledRows:
        """Return them, once the device has come as far as the copy."""
        return PooledRows(*self._columns, self._vectors.numpy())


def _sums(hidden: Tensor, firsts: np.ndarray, counts: np.ndarray) -> Tensor:
    """Return the sums of `counts` rows of `hidden` from each of `firsts` on, [k, hidden].

    They are added in float64, so that they hardly depend on how a prompt is cut into chunks.
    """
    before = np.cumsum(counts) - counts
    tokens = np.repeat(firsts - before, counts) + np.arange(int(counts.sum()))
    owners = np.repeat(np.arange(len(counts)), counts)
    index, into = upload_integers([tokens, owners], hidden.device)
    picked = hidden[index]
    if len(tokens) == len(counts):
        return picked
    sums = torch.zeros(len(counts), hidden.shape[1], dtype=torch.float64, device=hidden.device)
    return sums.index_add_(0, into, picked.double())
