"""Token masks by the C kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from pagedattn import torch_backend
from pagedattn.cpu_backend.arguments import BITMASK, TYPES, address, function
from pagedattn.cpu_backend.ops import FLOATS


@cache
def _octavo_bitmask() -> Callable[[bytes], int]:
    return function("octavo_bitmask", ctypes.c_int64, ctypes.c_char_p)


def apply_token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor | None) -> None:
    """See `pagedattn.apply_token_bitmask`."""
    if logits.dtype not in FLOATS:
        torch_backend.apply_token_bitmask(logits, bitmask, rows)
        return
    bitmask = bitmask.contiguous()
    rows = None if rows is None else rows.contiguous()
    arguments = BITMASK.pack(
        logits.data_ptr(),
        bitmask.data_ptr(),
        address(rows),
        logits.stride(0),
        *logits.shape,
        len(bitmask),
        TYPES[logits.dtype],
        torch.get_num_threads(),
    )
    wrong = _octavo_bitmask()(arguments)
    if wrong:
        raise IndexError(f"mask {wrong - 1} is for a row outside of the {len(logits)} of the logits")
