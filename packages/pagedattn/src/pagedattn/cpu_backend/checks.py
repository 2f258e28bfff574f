"""Checks of what the kernels trust: a batch that fits its cache, once a step."""

from __future__ import annotations

import ctypes

import torch

from pagedattn.cpu_backend.arguments import AttendArguments
from pagedattn.cpu_backend.build import load_library

# By the numbers of kernels/check.h.
_WRONG = {
    1: "query_starts must go from 0 to the number of query tokens and never down",
    2: "lengths must be 0, or at least the sequence's queries and at most what its block table holds",
    3: "the leading num_decodes sequences must have one query each",
    4: "shared_prefix reaches beyond the first query",
    5: "a block that a query sees is not one of the cache",
}


def check(arguments: AttendArguments, *, num_blocks: int, table: torch.Tensor) -> None:
    """Raise IndexError, naming the sequence, where a kernel would read outside its tensors."""
    which = ctypes.c_int32(0)
    code = load_library().octavo_check_batch(
        ctypes.byref(arguments),
        ctypes.c_int64(num_blocks),
        ctypes.c_int64(table.shape[1]),
        ctypes.byref(which),
    )
    if code:
        raise IndexError(f"sequence {which.value} of the batch: {_WRONG[code]}")
