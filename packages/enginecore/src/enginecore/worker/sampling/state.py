"""Sampling settings of the running rows."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from enginecore.messages import RowSampling
from enginecore.sampling_params import SamplingParams
from enginecore.worker.sampling.columns import SamplingColumns
from enginecore.worker.sampling.constraints import RowConstraints
from enginecore.worker.sampling.processors import ProcessorRows, Registered

_MOST = 2**31 - 1
"""More than any vocabulary has, and what an int32 column holds."""

_LARGEST = 1e30
"""Settings beyond it act like it; float32 and what is computed from it stay finite."""

_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")

_MOST_BATCHES = 16
"""Batches whose columns are kept; more than the stages of a pipeline have under way."""


class SamplingState:
    """A column for each setting, [max_rows]; rows are set when they are admitted and stay until freed."""

    def __init__(self, max_rows: int, processors: Sequence[Registered] = ()) -> None:
        """`processors` are those that the engine's options name."""
        self.num_prompt = np.zeros(max_rows, np.int32)
        self.top_k = np.zeros(max_rows, np.int32)
        self.seed = np.zeros(max_rows, np.uint64)
        self.logprobs = np.full(max_rows, -2, np.int32)
        """Candidates asked for; -1 is the whole vocabulary, -2 is none."""
        self.logprob_ids: dict[int, np.ndarray] = {}
        """By row, of those that ask for certain candidates: int32 [candidates]."""
        self.prompt_logprobs = np.full(max_rows, -2, np.int32)
        self.prompt_logprobs_done = np.zeros(max_rows, np.int32)
        self.floats = {name: np.zeros(max_rows, np.float32) for name in _FLOATS}
        self.penalised = np.zeros(max_rows, bool)
        self.processed = np.zeros(max_rows, bool)
        """Whether logits processors change the row's logits."""
        self.always_changed = np.zeros(max_rows, bool)
        """Whether penalties or processors do."""
        self.processors = ProcessorRows(processors)
        self.constrained_until = np.zeros(max_rows, np.int32)
        """Number of generated tokens from which on the row has no constraint; 0 for none at all."""
        self.constraints: dict[int, RowConstraints] = {}
        """By row, of those that have some: bans, bias, allowed ids, a minimum length."""
        self._columns: dict[tuple[bytes, bytes, torch.dtype], SamplingColumns] = {}

    def set(self, row: int, num_prompt: int, sampling: RowSampling) -> None:
        """Fill a row that is admitted; the first `num_prompt` of its tokens are the prompt."""
        params = sampling.params
        self.num_prompt[row] = num_prompt
        self.top_k[row] = min(params.top_k, _MOST)
        self.seed[row] = np.uint64(sampling.seed % 2**64)
        self.logprobs[row] = _count(params.logprobs)
        self.logprob_ids.pop(row, None)
        if params.logprob_token_ids is not None:
            ids = np.array(list(dict.fromkeys(params.logprob_token_ids)), np.int32)
            self.logprob_ids[row], self.logprobs[row] = ids, len(ids)
        self.prompt_logprobs[row] = _count(params.prompt_logprobs)
        self.prompt_logprobs_done[row] = sampling.prompt_logprobs_done
        for name, column in self.floats.items():
            column[row] = min(getattr(params, name), _LARGEST)
        # Logits are divided by it.
        self.floats["repetition_penalty"][row] = max(params.repetition_penalty, 1 / _LARGEST)
        self.penalised[row] = _penalised(params)
        self.processed[row] = self.processors.set(row, params)
        self.always_changed[row] = self.penalised[row] | self.processed[row]
        self._columns.clear()
        constraints = RowConstraints.of(sampling)
        self.constrained_until[row] = 0 if constraints is None else constraints.until
        if constraints is not None:
            self.constraints[row] = constraints

    def free(self, rows: Iterable[int]) -> None:
        """Forget rows that ended or were preempted."""
        for row in rows:
            self.constraints.pop(row, None)
            self.logprob_ids.pop(row, None)
            self.processors.free(row)

    def columns(
        self, rows: np.ndarray, lengths: np.ndarray, dtype: torch.dtype, device: torch.device
    ) -> SamplingColumns:
        """Return the settings of `rows` int[n] on `device`, for logits of `dtype`; kept until rows are set.

        `lengths` int[n] is the number of tokens that each row holds.
        """
        changed = self.always_changed[rows] | (lengths - self.num_prompt[rows] < self.constrained_until[rows])
        key = rows.tobytes(), changed.tobytes(), dtype
        found = self._columns.get(key)
        if found is None:
            if len(self._columns) == _MOST_BATCHES:
                self._columns.clear()
            found = self._columns[key] = SamplingColumns.make(self, rows, changed, dtype, device)
        return found

    def take_prompt_positions(
        self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the prompt positions of a step whose logprobs are asked for, and mark them as reported.

        The step runs the positions `starts[i]` to `ends[i] - 1` of each of `rows`, int[n]. The result is the
        places of the rows concerned, their first positions, and their ends, int[k] each.
        """
        firsts = np.maximum(starts, self.prompt_logprobs_done[rows])
        ends = np.minimum(ends, self.num_prompt[rows] - 1)
        taken = np.flatnonzero((self.prompt_logprobs[rows] > -2) & (firsts < ends))
        self.prompt_logprobs_done[rows[taken]] = ends[taken]
        return taken, firsts[taken], ends[taken]


def _count(asked: int | None) -> int:
    return -2 if asked is None else min(asked, _MOST)


def _penalised(params: SamplingParams) -> bool:
    return (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0.0, 0.0, 1.0)
