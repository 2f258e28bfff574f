"""Drawing tokens by the C kernel, a row at a time on each thread."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from pagedattn.cpu_backend.arguments import SAMPLE, TYPES, dense, function
from pagedattn.cpu_backend.ops import FLOATS


@cache
def _octavo_sample() -> Callable[[bytes], int]:
    return function("octavo_sample", ctypes.c_int32, ctypes.c_char_p)


def top_k_top_p_sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """See `pagedattn.top_k_top_p_sample`."""
    logits = dense(logits if logits.dtype in FLOATS else logits.float())
    tokens = torch.empty(len(logits), dtype=torch.int64)
    columns = [part.contiguous() for part in (temperature, top_p, min_p, top_k, seeds, positions)]
    arguments = SAMPLE.pack(
        logits.data_ptr(),
        *(part.data_ptr() for part in columns),
        tokens.data_ptr(),
        logits.stride(0),
        *logits.shape,
        TYPES[logits.dtype],
        torch.get_num_threads(),
    )
    if _octavo_sample()(arguments):
        raise MemoryError("sampling on the CPU found no memory for its scratch space")
    return tokens
