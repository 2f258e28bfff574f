"""Sampling settings of the running rows."""

from collections.abc import Iterable

import numpy as np

from enginecore.messages import RowSampling
from enginecore.sampling_params import SamplingParams

_MOST = 2**31 - 1
"""More than any vocabulary has, and what an int32 column holds."""

_LARGEST = 1e30
"""Settings beyond it act like it; float32 and what is computed from it stay finite."""

_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


class SamplingState:
    """A column for each setting, [max_rows]; rows are set when they are admitted and stay until freed."""

    def __init__(self, max_rows: int) -> None:
        self.num_prompt = np.zeros(max_rows, np.int32)
        self.top_k = np.zeros(max_rows, np.int32)
        self.seed = np.zeros(max_rows, np.uint64)
        self.logprobs = np.full(max_rows, -2, np.int32)
        """Candidates asked for; -1 is the whole vocabulary, -2 is none."""
        self.prompt_logprobs = np.full(max_rows, -2, np.int32)
        self.prompt_logprobs_done = np.zeros(max_rows, np.int32)
        self.floats = {name: np.zeros(max_rows, np.float32) for name in _FLOATS}
        self.penalised = np.zeros(max_rows, bool)
        self.constrained: dict[int, RowSampling] = {}
        """Rows with settings that few requests have: bans, bias, allowed ids, a minimum length."""

    def set(self, row: int, num_prompt: int, sampling: RowSampling) -> None:
        """Fill a row that is admitted; the first `num_prompt` of its tokens are the prompt."""
        params = sampling.params
        self.num_prompt[row] = num_prompt
        self.top_k[row] = min(params.top_k, _MOST)
        self.seed[row] = np.uint64(sampling.seed % 2**64)
        self.logprobs[row] = _count(params.logprobs)
        self.prompt_logprobs[row] = _count(params.prompt_logprobs)
        self.prompt_logprobs_done[row] = sampling.prompt_logprobs_done
        for name, column in self.floats.items():
            column[row] = min(getattr(params, name), _LARGEST)
        self.penalised[row] = _penalised(params)
        if _constrained(sampling):
            self.constrained[row] = sampling

    def free(self, rows: Iterable[int]) -> None:
        """Forget rows that ended or were preempted."""
        for row in rows:
            self.constrained.pop(row, None)


def _count(asked: int | None) -> int:
    return -2 if asked is None else min(asked, _MOST)


def _penalised(params: SamplingParams) -> bool:
    return (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0.0, 0.0, 1.0)


def _constrained(sampling: RowSampling) -> bool:
    params = sampling.params
    has_minimum = bool(params.min_tokens and sampling.stop_ids)
    return bool(sampling.bad_words or params.logit_bias or params.allowed_token_ids or has_minimum)
