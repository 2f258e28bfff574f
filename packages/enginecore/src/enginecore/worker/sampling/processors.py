"""Logits processors: bans, bias and penalties, applied before a token is drawn.

Logits are float32 [rows, vocab] and are changed in place.
"""

import numpy as np
import torch
from torch import Tensor

from enginecore.messages import RowSampling
from enginecore.worker.sampling.state import SamplingState


def apply_constraints(
    logits: Tensor, rows: np.ndarray, lengths: np.ndarray, tokens: Tensor, state: SamplingState
) -> None:
    """Apply allowed ids, bad words, minimum length and bias to the rows that have them.

    `lengths` int[n] is the number of tokens each row holds, `tokens` int32 [max_rows, max_len] those tokens.
    """
    for index, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        sampling = state.constrained.get(row)
        if sampling is not None:
            generated = length - int(state.num_prompt[row])
            _apply_row(logits[index], sampling, generated, tokens[row, :length])


def _apply_row(logits: Tensor, sampling: RowSampling, generated: int, tokens: Tensor) -> None:
    params = sampling.params
    if params.allowed_token_ids is not None:
        kept = logits[params.allowed_token_ids]
        logits.fill_(-torch.inf)
        logits[params.allowed_token_ids] = kept
    for word in sampling.bad_words:
        if _would_complete(word, generated, tokens):
            logits[word[-1]] = -torch.inf
    if generated < params.min_tokens and sampling.stop_ids:
        logits[sampling.stop_ids] = -torch.inf
    if params.logit_bias:
        ids = list(params.logit_bias)
        logits[ids] += torch.tensor(
            list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device
        )


def _would_complete(word: list[int], generated: int, tokens: Tensor) -> bool:
    before = len(word) - 1
    if before > generated:
        return False
    return before == 0 or tokens[-before:].tolist() == word[:-1]


def apply_penalties(
    logits: Tensor, rows: np.ndarray, lengths: np.ndarray, tokens: Tensor, state: SamplingState
) -> None:
    """Apply repetition (prompt and output), presence and frequency (output) penalties.

    Repetition follows Keskar et al., CTRL: a positive logit is divided, a negative one multiplied.
    """
    picked = np.flatnonzero(state.penalised[rows])
    vocab = logits.shape[-1]
    for index in picked.tolist():
        row, length = int(rows[index]), int(lengths[index])
        held = tokens[row, :length].long()
        output = torch.bincount(held[int(state.num_prompt[row]) :], minlength=vocab)
        seen = output.clone()
        seen[held] += 1
        repetition = float(state.floats["repetition_penalty"][row])
        values = logits[index]
        scaled = torch.where(values > 0, values / repetition, values * repetition)
        torch.where(seen > 0, scaled, values, out=values)
        values -= float(state.floats["frequency_penalty"][row]) * output
        values -= float(state.floats["presence_penalty"][row]) * (output > 0)
