"""Paged attention on CPUs in C with OpenMP, compiled at first use (see `build`)."""

from __future__ import annotations

import torch

from pagedattn.backends import ScoreOptions
from pagedattn.batch import AttentionBatch
from pagedattn.cpu_backend.arguments import ATTEND, TYPES, WRITE, address, dense, float32, launch
from pagedattn.cpu_backend.bitmask import apply_token_bitmask
from pagedattn.cpu_backend.embedding import embedding
from pagedattn.cpu_backend.experts import (
    group_by_expert,
    grouped_linear,
    top_k_softmax,
    weighted_sum,
)
from pagedattn.cpu_backend.linear import linear, linear_panel
from pagedattn.cpu_backend.ops import activation, gelu_and_mul, layer_norm, rms_norm, rotary, silu_and_mul
from pagedattn.cpu_backend.sampling import top_k_top_p_sample
from pagedattn.torch_backend import copy_blocks, grouped_matmul

__all__ = [
    "activation",
    "apply_token_bitmask",
    "attend",
    "copy_blocks",
    "embedding",
    "gelu_and_mul",
    "group_by_expert",
    "grouped_linear",
    "grouped_matmul",
    "layer_norm",
    "linear",
    "linear_panel",
    "rms_norm",
    "rotary",
    "silu_and_mul",
    "top_k_softmax",
    "top_k_top_p_sample",
    "weighted_sum",
    "write_kv",
]


# By the numbers of kernels/check.h.
_WRONG = {
    1: "query_starts must go from 0 to the number of query tokens and never down",
    2: "lengths must be 0, or at least the sequence's queries and at most what its block table holds",
    3: "the leading num_decodes sequences must have one query each",
    4: "shared_prefix reaches beyond the first query",
    5: "a block that a query sees is not one of the cache",
}
_ERRORS = 8
_LARGEST_INT = 2**31 - 1


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    kv_scales: torch.Tensor | None,
) -> None:
    """See `pagedattn.write_kv`."""
    key, value, slots = dense(key), dense(value), slots.contiguous()
    scales = float32(kv_scales)
    kv_heads, block_size, head_dim = cache.shape[2:]
    num_slots = cache.shape[0] * block_size
    error = launch(
        WRITE,
        key.data_ptr(),
        value.data_ptr(),
        cache.data_ptr(),
        slots.data_ptr(),
        address(scales),
        *key.stride()[:2],
        *value.stride()[:2],
        num_slots,
        slots.shape[0],
        kv_heads,
        head_dim,
        block_size,
        TYPES[key.dtype],
        TYPES[cache.dtype],
        torch.get_num_threads(),
    )
    if error:
        raise write_error(error, slots, num_slots)


def write_error(error: int, slots: torch.Tensor, num_slots: int) -> IndexError:
    """Return what `launch` says of WRITE."""
    token = error - 1
    return IndexError(
        f"slot {slots[token]} of token {token} is not in the cache, which has {num_slots} slots"
    )


def attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    options: ScoreOptions,
    out: torch.Tensor,
) -> None:
    """See `pagedattn.attend`."""
    query, result = dense(query), out
    if out.stride(-1) != 1:
        result = torch.empty_like(out, memory_format=torch.contiguous_format)
    starts, lengths = batch.query_starts.contiguous(), batch.lengths.contiguous()
    table = dense(batch.block_table)
    slopes, sinks = float32(options.alibi_slopes), float32(options.sinks)
    scales = float32(options.kv_scales)
    kv_heads, block_size, head_dim = cache.shape[2:]
    error = launch(
        ATTEND,
        query.data_ptr(),
        cache.data_ptr(),
        result.data_ptr(),
        starts.data_ptr(),
        lengths.data_ptr(),
        table.data_ptr(),
        address(slopes),
        address(sinks),
        address(scales),
        0,
        *query.stride()[:2],
        *result.stride()[:2],
        table.stride(0),
        cache.shape[0],
        table.shape[1],
        batch.num_seqs,
        batch.num_decodes,
        query.shape[0],
        query.shape[1],
        kv_heads,
        head_dim,
        block_size,
        batch.shared_prefix,
        0 if options.window is None else min(options.window, _LARGEST_INT),
        0,
        TYPES[query.dtype],
        TYPES[cache.dtype],
        torch.get_num_threads(),
        options.scale,
        options.soft_cap or 0.0,
    )
    if error:
        raise attend_error(error)
    if result is not out:
        out.copy_(result)


def attend_error(error: int) -> MemoryError | IndexError:
    """Return what `launch` says of ATTEND."""
    if error < 0:
        return MemoryError("attention on the CPU found no memory for its scratch space")
    return IndexError(f"sequence {error // _ERRORS} of the batch: {_WRONG[error % _ERRORS]}")
