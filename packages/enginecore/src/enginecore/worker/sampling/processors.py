"""What changes a row's logits before a token is drawn: bans, bias, penalties.

Logits are float32 [rows, vocab] and are changed in place.
"""

import numpy as np
import torch
from torch import Tensor

from enginecore.worker.runner.rows import RowExtras, Rows


def apply_extras(logits: Tensor, rows: np.ndarray, lengths: np.ndarray, state: Rows) -> None:
    """Apply allowed ids, bad words, minimum length and bias to the rows that have them.

    `lengths` int[n] is the number of tokens each row holds.
    """
    for index, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        extras = state.extras.get(row)
        if extras is not None:
            generated = length - int(state.num_prompt[row])
            _apply_row(logits[index], extras, generated, state.tokens[row, :length])


def _apply_row(logits: Tensor, extras: RowExtras, generated: int, tokens: Tensor) -> None:
    if extras.allowed is not None:
        kept = logits[extras.allowed]
        logits.fill_(-torch.inf)
        logits[extras.allowed] = kept
    for word in extras.bad_words:
        if _would_complete(word, generated, tokens):
            logits[word[-1]] = -torch.inf
    if generated < extras.min_tokens:
        logits[list(extras.stop_ids)] = -torch.inf
    if extras.logit_bias:
        ids = list(extras.logit_bias)
        logits[ids] += torch.tensor(list(extras.logit_bias.values()), device=logits.device)


def _would_complete(word: tuple[int, ...], generated: int, tokens: Tensor) -> bool:
    before = len(word) - 1
    if before > generated:
        return False
    return before == 0 or tokens[-before:].tolist() == list(word[:-1])


def apply_penalties(logits: Tensor, rows: np.ndarray, lengths: np.ndarray, state: Rows) -> None:
    """Apply repetition (prompt and output), presence and frequency (output) penalties.

    Repetition follows Keskar et al., CTRL: a positive logit is divided, a negative one multiplied.
    """
    picked = np.flatnonzero(state.penalised[rows])
    vocab = logits.shape[-1]
    for index in picked.tolist():
        row, length = int(rows[index]), int(lengths[index])
        tokens = state.tokens[row, :length].long()
        output = torch.bincount(tokens[int(state.num_prompt[row]) :], minlength=vocab)
        seen = output.clone()
        seen[tokens] += 1
        repetition = float(state.floats["repetition_penalty"][row])
        values = logits[index]
        scaled = torch.where(values > 0, values / repetition, values * repetition)
        torch.where(seen > 0, scaled, values, out=values)
        values -= float(state.floats["frequency_penalty"][row]) * output
        values -= float(state.floats["presence_penalty"][row]) * (output > 0)
