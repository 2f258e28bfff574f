"""Draw the next tokens of a batch, each row by its own settings and its own random stream."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from enginecore.messages import RowSampling
from enginecore.sampling_params import SamplingParams
from enginecore.worker.sampling.columns import Part, SamplingColumns
from enginecore.worker.sampling.guides import TokenMasks
from enginecore.worker.sampling.logprobs import LogprobColumns
from enginecore.worker.sampling.penalties import HELD
from enginecore.worker.sampling.state import SamplingState
from enginecore.worker.upload import upload_integers
from pagedattn import NOT_FINITE, top_k_top_p_sample


class SamplingRows(NamedTuple):
    """Rows that sample in a step, int[n], and how many tokens each holds; on the host and on the device."""

    rows: np.ndarray
    lengths: np.ndarray
    device_rows: Tensor
    device_lengths: Tensor
    """int64."""

    @classmethod
    def upload(cls, rows: np.ndarray, lengths: np.ndarray, device: torch.device) -> "SamplingRows":
        """Put both columns on `device`."""
        return cls(rows, lengths, *upload_integers([rows, lengths], device))


class Sampled(NamedTuple):
    """Ids or NOT_FINITE, int64 [n] on the device, and log probabilities by index, of the rows that asked."""

    tokens: Tensor
    logprobs: list[LogprobColumns]
    errors: Mapping[int, str] = {}
    """By index, what is said of a row with logits processors if it has no token."""


def sample(
    logits: Tensor,
    batch: SamplingRows,
    tokens: Tensor,
    state: SamplingState,
    masks: TokenMasks | None = None,
) -> Sampled:
    """Choose a token for each row of logits [n, vocab] in any floating-point dtype; they may be overwritten.

    `tokens` is int32 [max_rows, max_len]. Log probabilities are those of the model, before any setting
    changes them. The order of the rest is vLLM's: bans and bias, processors, penalties, temperature, min-p,
    top-k, top-p. `masks` are those of rows with a grammar: what they forbid stays forbidden by all else.
    """
    columns = state.columns(batch.rows, batch.lengths, logits.dtype, logits.device)
    errors: dict[int, str] = {}
    drawn = [_draw(logits, part, columns, batch, tokens, masks, errors) for part in columns.parts]
    chosen = drawn[0] if columns.order is None else torch.cat(drawn)[columns.order]
    logprobs = []
    reported = chosen.clamp(min=0) if columns.logprobs else chosen
    for index, rows, width, candidates in columns.logprobs:
        found = LogprobColumns(index, np.ones(len(index), np.int64), width, logits.shape[-1], logits.device)
        found.write(0, logits, reported if rows is None else reported[rows], rows, candidates)
        logprobs.append(found)
    return Sampled(chosen, logprobs, errors)


def sample_with_everything(logits: Tensor, max_logprobs: int) -> None:
    """Sample from logits [n, vocab] with what takes the most memory on top of them, for it to be measured.

    Prompt log probabilities of as many positions take no more.
    """
    rows = np.arange(len(logits), dtype=np.int32)
    lengths = np.full_like(rows, max(1, HELD // len(rows)))
    state = SamplingState(len(rows))
    params = SamplingParams(top_p=0.9, repetition_penalty=1.1, logprobs=max_logprobs)
    for row in rows.tolist():
        state.set(row, 1, RowSampling(params, [], [], row))
    tokens = torch.zeros(len(rows), lengths[0], dtype=torch.int32, device=logits.device)
    sample(logits, SamplingRows.upload(rows, lengths, logits.device), tokens, state)


def _draw(
    logits: Tensor,
    part: Part,
    columns: SamplingColumns,
    batch: SamplingRows,
    tokens: Tensor,
    masks: TokenMasks | None,
    errors: dict[int, str],
) -> Tensor:
    """Return a token, or NOT_FINITE, for each row of `part`, int64 [m].

    `errors` gets what is said of rows with logits processors that have no token.
    """
    positions = batch.device_lengths
    if part.rows is not None:
        logits, positions = logits[part.rows], positions[part.rows]
    must_stay = part.rows is None and bool(columns.logprobs)
    if part.changed:
        logits = logits.to(torch.float32, copy=must_stay)
    elif masks is not None and must_stay:
        logits = logits.clone()
    if part.changed:
        if columns.constraints is not None:
            columns.constraints.apply(logits, batch.device_lengths, tokens)
        if columns.processors is not None:
            errors.update(columns.processors.apply(logits, batch.lengths, tokens))
    if masks is not None:
        # After processors, which might allow again what a grammar forbids.
        masks.apply(logits, part.members)
    if part.changed and columns.penalties is not None:
        columns.penalties.apply(logits, batch.lengths, batch.device_lengths, tokens)
    if part.settings is None:
        return _highest(logits)
    return top_k_top_p_sample(logits, **part.settings._asdict(), positions=positions)


def _highest(logits: Tensor) -> Tensor:
    """Return the likeliest token of each row by the device's own argmax, or NOT_FINITE."""
    chosen = logits.argmax(-1)
    # Where all logits are NaN so is the chosen one: to look at it costs nothing.
    return chosen.where(logits.gather(-1, chosen[:, None])[:, 0].isfinite(), NOT_FINITE)
