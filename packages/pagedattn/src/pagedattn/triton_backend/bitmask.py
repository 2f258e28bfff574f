# ruff: noqa: ANN001, ANN201 (Triton infers the types of kernel arguments)
"""Token masks in one Triton launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

TILE = 4096


@triton.jit(do_not_specialize=["vocab"])
def bitmask_kernel(
    logits,
    bitmask,
    rows,
    vocab,
    stride,
    words,
    LISTED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (masks, tiles of the vocabulary); without LISTED, mask i is row i's."""
    number = tl.program_id(0).to(tl.int64)
    row = number
    if LISTED:
        row = tl.load(rows + number)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = token < vocab
    bits = tl.load(bitmask + number * words + token // 32, mask=inside, other=-1)
    banned = ((bits >> (token % 32)) & 1) == 0
    nothing = tl.full([TILE], -float("inf"), tl.float32)
    tl.store(logits + row * stride + token, nothing, mask=inside & banned)


def apply_token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor | None) -> None:
    """See `pagedattn.apply_token_bitmask`."""
    vocab = logits.shape[1]
    bitmask = bitmask.contiguous()
    constants: dict[str, Any] = {"LISTED": rows is not None, "TILE": TILE}
    with torch.cuda.device_of(logits):
        bitmask_kernel[(len(bitmask), triton.cdiv(vocab, TILE))](
            logits,
            bitmask,
            bitmask if rows is None else rows.contiguous(),
            vocab,
            logits.stride(0),
            bitmask.shape[1],
            **constants,
        )
