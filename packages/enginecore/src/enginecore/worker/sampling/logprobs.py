"""Log probabilities of tokens and of the likeliest candidates, in pieces of bounded memory.

A row's values depend on its own logits alone. They are those of `log_softmax` in float32, so candidates are
ordered and ranks counted by what is reported.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from enginecore.messages import PositionLogprobs

PIECE = 1 << 22
"""Most logits that are normalised at once, or one row: 16 MiB in float32."""

_MOST_PINNED = 1 << 22
"""Most values whose copy to the host does not wait for the device; pinned memory is never given back."""


class LogprobColumns:
    """Log probabilities at consecutive positions of several keys, on their way to the host.

    Attributes, on the host, to be read once the device has come as far as the last `write`:

    - `ids` int32 and `values` float32 [positions, 1 + candidates], the actual token's first;
    - `ranks` int32 [positions]: the actual token's, 1 for the likeliest.
    """

    def __init__(
        self, keys: np.ndarray, counts: np.ndarray, width: int, vocab: int, device: torch.device
    ) -> None:
        """Make room for `counts[i]` positions of `keys[i]`, int [k] each, one key after another.

        `width` candidates are kept at each position, or all there are; -1 is the whole vocabulary.
        """
        self._keys = keys
        self._ends = np.cumsum(counts)
        self._candidates = vocab if width == -1 else min(width, vocab)
        positions = int(counts.sum())
        shape = positions, 1 + self._candidates
        pinned = device.type != "cpu" and positions * shape[1] <= _MOST_PINNED
        self.ids = torch.empty(shape, dtype=torch.int32, pin_memory=pinned)
        self.values = torch.empty(shape, dtype=torch.float32, pin_memory=pinned)
        self.ranks = torch.empty(positions, dtype=torch.int32, pin_memory=pinned)

    def write(
        self,
        start: int,
        logits: Tensor,
        tokens: Tensor,
        rows: Tensor | None = None,
        candidates: Tensor | None = None,
    ) -> None:
        """Fill the positions from `start` on, whose actual tokens are `tokens` int64 [n].

        Their logits are rows 0 to n - 1 of `logits` […, vocab], in any floating-point dtype, or those of
        `rows` int64 [n]. Candidates are the likeliest, or those in `candidates` int64 [n, width].
        """
        step = max(1, PIECE // logits.shape[-1])
        for first in range(0, len(tokens), step):
            part = slice(first, first + step)
            picked = logits[part] if rows is None else logits[rows[part]]
            wanted = self._candidates if candidates is None else candidates[part]
            found = _normalise(picked, tokens[part], wanted)
            target = slice(start + first, start + first + len(picked))
            for column, piece in zip((self.ids, self.values, self.ranks), found, strict=True):
                column[target].copy_(piece, non_blocking=True)

    def by_key(self) -> dict[int, PositionLogprobs]:
        """Return what was written, by key."""
        ids, values, ranks = self.ids.numpy(), self.values.numpy(), self.ranks.numpy()
        ends = self._ends.tolist()
        spans = [slice(start, end) for start, end in zip([0, *ends], ends)]
        return {
            key: PositionLogprobs(ids[span], values[span], ranks[span])
            for key, span in zip(self._keys.tolist(), spans, strict=True)
        }


class _Found(NamedTuple):
    ids: Tensor
    values: Tensor
    ranks: Tensor


def _normalise(logits: Tensor, tokens: Tensor, candidates: int | Tensor) -> _Found:
    """Return ids, values [n, 1 + candidates] and ranks [n] of logits [n, vocab] and tokens [n].

    `candidates` is how many of the likeliest there are, or which ones, int64 [n, candidates].
    """
    logprobs = logits.log_softmax(-1, dtype=torch.float32)
    actual = logprobs.gather(-1, tokens[:, None])
    if isinstance(candidates, Tensor):
        others, values = candidates, logprobs.gather(-1, candidates)
    else:
        values, others = logprobs.topk(candidates, dim=-1)
    ids = torch.cat([tokens[:, None].to(torch.int32), others.to(torch.int32)], dim=-1)
    # In place and in float32, which counts a vocabulary exactly: a sum of booleans is one of an int64 copy.
    ranks = logprobs.gt_(actual).sum(-1).to(torch.int32) + 1
    return _Found(ids, torch.cat([actual, values], dim=-1), ranks)


def merged(columns: Iterable[LogprobColumns]) -> dict[int, PositionLogprobs]:
    """Return what all of `columns` hold, by key."""
    return {key: entry for each in columns for key, entry in each.by_key().items()}
