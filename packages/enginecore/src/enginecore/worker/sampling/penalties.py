"""Repetition, presence and frequency penalties, as one pass over the tokens that penalised rows hold."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from enginecore.worker.upload import upload_floats, upload_integers

HELD = 1 << 20
"""Most held tokens that are worked on at once, or those of one row: some 64 MiB."""

_CPU_COUNTERS, _COUNTERS = 1 << 22, 1 << 24
"""Most counters of four bytes at once, one for each token of the vocabulary, or those of one row.

A CPU maps larger blocks anew each time, which takes longer than to fill them; a device waits for launches.
"""


class _OnDevice(NamedTuple):
    """Columns [p] on the device, int64 and float32."""

    firsts: Tensor
    """Position of the first token that counts."""
    indices: Tensor
    """The row among those that sample."""
    places: Tensor
    """The row among those whose logits are changed."""
    rows: Tensor
    """The row among all."""
    num_prompt: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor

    def take(self, part: slice) -> "_OnDevice":
        return _OnDevice(*(column[part] for column in self))


class PenaltyColumns(NamedTuple):
    """Penalised rows of a batch: on the device, and of `firsts` and `indices` int[p] on the host too."""

    first: np.ndarray
    index: np.ndarray
    columns: _OnDevice

    @classmethod
    def make(
        cls,
        index: np.ndarray,
        places: np.ndarray,
        rows: np.ndarray,
        num_prompt: np.ndarray,
        penalties: list[np.ndarray],
        device: torch.device,
    ) -> "PenaltyColumns":
        """Put what is known of penalised rows on `device`: int[p], and float32 [p] for each of `penalties`.

        These are repetition, frequency and presence. `index` is a row's number among those that sample,
        `places` among those whose logits are changed, `rows` among all.
        """
        # Only repetition looks at the prompt.
        first = np.where(penalties[0] == 1.0, num_prompt, 0)
        integers = upload_integers([first, index, places, rows, num_prompt], device)
        return cls(first, index, _OnDevice(*integers, *upload_floats(penalties, device)))

    def apply(self, logits: Tensor, lengths: np.ndarray, device_lengths: Tensor, tokens: Tensor) -> None:
        """Penalise logits float32 [m, vocab] in place.

        `lengths` int[n], on the device int64, is the number of tokens of each row that samples; `tokens`
        int32 [max_rows, max_len] are the tokens of all rows. Repetition follows Keskar et al., CTRL: a
        positive logit is divided, a negative one multiplied.
        """
        held = lengths[self.index] - self.first
        counters = _CPU_COUNTERS if logits.device.type == "cpu" else _COUNTERS
        step = max(1, min(counters // logits.shape[-1], HELD // max(1, int(held.max()))))
        for start in range(0, len(held), step):
            part = slice(start, start + step)
            total = int(held[part].sum())
            if total:
                columns = self.columns if step >= len(held) else self.columns.take(part)
                _penalise(logits, columns, total, device_lengths, tokens)


def _penalise(logits: Tensor, columns: _OnDevice, total: int, lengths: Tensor, tokens: Tensor) -> None:
    """Penalise the rows of `columns`, whose tokens that count are `total` in all."""
    vocab, device = logits.shape[-1], logits.device
    counts = lengths[columns.indices] - columns.firsts
    # One element a held token from here on; of one that its row holds again, all get the same value.
    each = torch.repeat_interleave(counts, output_size=total)
    before = counts.cumsum(0) - counts
    positions = torch.arange(total, device=device) + (columns.firsts - before)[each]
    ids = tokens[columns.rows[each], positions].long()
    counters = torch.zeros(len(counts) * vocab, dtype=torch.int32, device=device)
    counter = each * vocab + ids
    is_output = (positions >= columns.num_prompt[each]).to(torch.int32)
    generated = counters.scatter_add_(0, counter, is_output)[counter]
    places, repetition = columns.places[each], columns.repetition[each]
    values = logits[places, ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= columns.frequency[each] * generated
    values -= columns.presence[each] * (generated > 0)
    logits[places, ids] = values
