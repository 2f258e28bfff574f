"""Token masks: which tokens of the vocabulary may be drawn, a bit each."""

from __future__ import annotations

import torch

from pagedattn.backends import backend_of

WORD = 32
"""Tokens of one int32 of a mask: token i is bit i % 32 of word i // 32, 1 for a token that may come."""


def apply_token_bitmask(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    rows: torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Set to -inf the logits of tokens whose bit is 0, in place.

    - `logits [n, vocab]` float32, float16 or bfloat16, each row contiguous;
    - `bitmask` int32 `[m, ceil(vocab / 32)]` on the same device; bits beyond the vocabulary are ignored;
    - `rows` int64 `[m]` on the same device: the row of each mask, no row twice; None where mask i is row i's,
      and then m is n.

    Rows that no mask names stay as they are, and cost nothing. On a device nothing waits for `rows`, so their
    values are not checked there; on a CPU one outside of `logits` raises IndexError. Raises ValueError when
    shapes, dtypes or devices do not fit together.
    """
    if logits.ndim != 2 or not logits.is_floating_point() or logits.stride(1) != 1:
        raise ValueError(
            f"logits must be floating-point [n, vocab] with contiguous rows, "
            f"not {logits.dtype} {list(logits.shape)} with strides {list(logits.stride())}"
        )
    words = -(-logits.shape[1] // WORD)
    if bitmask.dtype != torch.int32 or bitmask.ndim != 2 or bitmask.shape[1] != words:
        raise ValueError(
            f"bitmask must be int32 [m, {words}] for a vocabulary of {logits.shape[1]}, "
            f"not {bitmask.dtype} {list(bitmask.shape)}"
        )
    if rows is None:
        if len(bitmask) != len(logits):
            raise ValueError(f"{len(bitmask)} masks for {len(logits)} rows of logits need `rows`")
    elif rows.dtype != torch.int64 or rows.shape != bitmask.shape[:1]:
        raise ValueError(f"rows must be int64 [{len(bitmask)}], not {rows.dtype} {list(rows.shape)}")
    for name, given in (("bitmask", bitmask), ("rows", rows)):
        if given is not None and given.device != logits.device:
            raise ValueError(f"{name} is on {given.device}, logits are on {logits.device}")
    if len(bitmask):
        backend_of(logits.device, backend).apply_token_bitmask(logits, bitmask, rows)
