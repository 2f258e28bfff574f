"""Token masks in plain torch."""

from __future__ import annotations

import torch

from pagedattn.bitmask import WORD

_PIECE = 1 << 22
"""Most logits whose bits are unpacked at once: an int32 each."""


def apply_token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor | None) -> None:
    """See `pagedattn.apply_token_bitmask`."""
    vocab = logits.shape[1]
    if rows is None:
        rows = torch.arange(len(logits), device=logits.device)
    elif logits.device.type == "cpu" and (rows.min() < 0 or rows.max() >= len(logits)):
        raise IndexError(f"a mask is for a row outside of the {len(logits)} of the logits")
    shifts = torch.arange(WORD, dtype=torch.int32, device=logits.device)
    step = max(1, _PIECE // vocab)
    for start in range(0, len(rows), step):
        picked, words = rows[start : start + step], bitmask[start : start + step]
        bits = (words[:, :, None] >> shifts) & 1
        banned = bits.flatten(1)[:, :vocab] == 0
        logits[picked] = logits[picked].masked_fill_(banned, -torch.inf)
