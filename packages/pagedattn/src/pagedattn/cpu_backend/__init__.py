"""Paged attention on CPUs in C with OpenMP, compiled at first use (see `build`)."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from pagedattn.backends import ScoreOptions
from pagedattn.batch import AttentionBatch
from pagedattn.cpu_backend.arguments import (
    TYPES,
    AttendArguments,
    WriteArguments,
    address,
    dense,
    float32,
)
from pagedattn.cpu_backend.build import load_library
from pagedattn.cpu_backend.checks import check
from pagedattn.cpu_backend.linear import linear, linear_panel
from pagedattn.cpu_backend.ops import gelu_and_mul, rms_norm, rotary, silu_and_mul
from pagedattn.cpu_backend.sampling import top_k_top_p_sample
from pagedattn.torch_backend import copy_blocks, grouped_matmul

__all__ = [
    "attend",
    "copy_blocks",
    "gelu_and_mul",
    "grouped_matmul",
    "linear",
    "linear_panel",
    "rms_norm",
    "rotary",
    "silu_and_mul",
    "top_k_top_p_sample",
    "write_kv",
]


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
    arguments = WriteArguments(
        key=key.data_ptr(),
        value=value.data_ptr(),
        cache=cache.data_ptr(),
        slots=slots.data_ptr(),
        kv_scales=address(scales),
        key_stride=key.stride(0),
        key_head_stride=key.stride(1),
        value_stride=value.stride(0),
        value_head_stride=value.stride(1),
        num_slots=cache.shape[0] * block_size,
        num_tokens=slots.shape[0],
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        type=TYPES[key.dtype],
        cache_type=TYPES[cache.dtype],
        threads=torch.get_num_threads(),
    )
    token = load_library().octavo_write_kv(ctypes.byref(arguments))
    if token >= 0:
        raise IndexError(
            f"slot {slots[token]} of token {token} is not in the cache, "
            f"which has {cache.shape[0]} blocks of {block_size}"
        )


class _Prepared(NamedTuple):
    """Arguments that all layers of a step share, and the tensors that they point into."""

    arguments: AttendArguments
    tensors: tuple[torch.Tensor | None, ...]


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
    key = ("cpu", query.shape[1], query.dtype, cache.shape, cache.dtype, *options[:3])
    prepared = batch.memo.get(key)
    if prepared is None:
        prepared = batch.memo[key] = _prepare(query, cache, batch, options)
    slopes, sinks = float32(options.alibi_slopes), float32(options.sinks)
    scales = float32(options.kv_scales)
    # A copy: another thread may be attending with the same batch, outside Python's lock.
    arguments = AttendArguments.from_buffer_copy(prepared.arguments)
    arguments.query = query.data_ptr()
    arguments.cache = cache.data_ptr()
    arguments.out = result.data_ptr()
    arguments.slopes = address(slopes)
    arguments.sinks = address(sinks)
    arguments.kv_scales = address(scales)
    arguments.query_stride, arguments.query_head_stride = query.stride()[:2]
    arguments.out_stride, arguments.out_head_stride = result.stride()[:2]
    if load_library().octavo_attend(ctypes.byref(arguments)):
        raise MemoryError("attention on the CPU found no memory for its scratch space")
    if result is not out:
        out.copy_(result)


def _prepare(
    query: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, options: ScoreOptions
) -> _Prepared:
    kv_heads, block_size, head_dim = cache.shape[2:]
    starts, lengths = batch.query_starts.contiguous(), batch.lengths.contiguous()
    table = dense(batch.block_table)
    arguments = AttendArguments(
        query_starts=starts.data_ptr(),
        lengths=lengths.data_ptr(),
        block_table=table.data_ptr(),
        table_stride=table.stride(0),
        num_seqs=batch.num_seqs,
        num_decodes=batch.num_decodes,
        num_tokens=query.shape[0],
        q_heads=query.shape[1],
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        shared_prefix=batch.shared_prefix,
        # One that nothing reaches beyond is none, and may be more than the kernels' integers hold.
        window=0 if options.window is None or options.window >= batch.max_length else options.window,
        type=TYPES[query.dtype],
        cache_type=TYPES[cache.dtype],
        threads=torch.get_num_threads(),
        scale=options.scale,
        soft_cap=options.soft_cap or 0.0,
    )
    check(arguments, num_blocks=cache.shape[0], table=table)
    return _Prepared(arguments, (starts, lengths, table))
