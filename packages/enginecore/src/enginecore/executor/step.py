"""What the core tells a worker to run, and what comes back."""

from typing import NamedTuple

import numpy as np

from enginecore.sampling_params import SamplingParams


class RowStart(NamedTuple):
    """A request that takes a row with this step."""

    row: int
    tokens: np.ndarray
    """int32 ids: the prompt, and what was generated before a preemption."""
    num_prompt: int
    params: SamplingParams
    stop_ids: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]
    seed: int
    prompt_logprobs_from: int
    """Prompt positions whose log probabilities have been reported already."""


class BlockCopies(NamedTuple):
    """KV cache blocks to copy before a step runs, in this order; int32 [n] block ids, pairwise."""

    out_sources: np.ndarray
    """Device blocks that go to the host blocks of the next."""
    out_destinations: np.ndarray
    in_sources: np.ndarray
    """Host blocks that go to the device blocks of the next."""
    in_destinations: np.ndarray
    sources: np.ndarray
    """Device blocks that go to the device blocks of the next."""
    destinations: np.ndarray


class SampledTokens(NamedTuple):
    """What rows have sampled, for the stages of a pipeline that did not; int32 [n] each."""

    rows: np.ndarray
    positions: np.ndarray
    ids: np.ndarray


class StepInput(NamedTuple):
    """One step. Blocks are copied first; `closed` rows are given up before `started` ones are filled.

    What was sampled comes before both, as it may be of rows that have ended.
    """

    step: int
    rows: np.ndarray
    """int32[n]."""
    starts: np.ndarray
    """int32[n]: position of the first token to run."""
    counts: np.ndarray
    """int32[n]: tokens to run."""
    samples: np.ndarray
    """bool[n]: whether the row's next token is to be sampled."""
    closed: np.ndarray
    """int32[]."""
    started: list[RowStart]
    block_rows: np.ndarray
    """int32[m], with the two below: new entries of the block tables."""
    block_indices: np.ndarray
    block_ids: np.ndarray
    copies: BlockCopies | None = None
    """None where there is nothing to copy, which is nearly always."""
    sampled: SampledTokens | None = None
    """What was sampled since the step before, where there are several stages."""


class PositionLogprobs(NamedTuple):
    """Log probabilities at consecutive positions of one row, the actual token's first."""

    row: int
    ids: np.ndarray
    """int32[positions, width]."""
    values: np.ndarray
    """float32[positions, width]."""
    ranks: np.ndarray
    """int32[positions]: 1 for the most likely token."""


class StepOutput(NamedTuple):
    """What a step sampled, in the order of the plan's sampling rows."""

    step: int
    tokens: np.ndarray
    """int32[k]."""
    logprobs: dict[int, PositionLogprobs]
    """By index into `tokens`, for rows that asked."""
    prompt_logprobs: list[PositionLogprobs]
