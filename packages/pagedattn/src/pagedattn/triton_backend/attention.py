"""Launches of the attention kernels.

A step's attention is one launch for decodes and prefills together, beside one more for a shared prefix that
pays to be read once, and a merge where contexts are cut (see `plan`). Launch shapes follow from tensor shapes
and the batch's host numbers alone: nothing waits for the device, and a captured CUDA graph stays right for
other contents of the same tensors as long as `max_query` and `max_length` are upper bounds, and `num_decodes`
and `shared_prefix`, which are baked into the launches, hold.
"""

from __future__ import annotations

from functools import cache as memoize
from typing import Any

import torch
import triton.language as tl

from pagedattn.backends import ScoreOptions
from pagedattn.batch import AttentionBatch
from pagedattn.layout import FP8
from pagedattn.triton_backend.arguments import Cache, Partials, Rows, Scoring, Sequences, Tile
from pagedattn.triton_backend.cascade import attend_prefix_kernel
from pagedattn.triton_backend.kernels import attend_kernel, write_kv_kernel
from pagedattn.triton_backend.plan import Device, Plan, head_tiles, make_plan, prefix_query_tiles
from pagedattn.triton_backend.split import merge_kernel
from pagedattn.triton_backend.tiles import Tiles, next_power_of_2

# The first compute capability that converts float8_e4m3fn by itself.
HARDWARE_FP8 = (8, 9)
# Partial results a step of the merge.
MERGE_PARTS = 16


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    kv_scales: torch.Tensor | None,
) -> None:
    """See `pagedattn.write_kv`."""
    kv_heads, head_dim = cache.shape[2], cache.shape[4]
    sizes: dict[str, Any] = {"TILE_HEADS": next_power_of_2(kv_heads), "TILE_DIM": next_power_of_2(head_dim)}
    with torch.cuda.device_of(cache):
        write_kv_kernel[(slots.shape[0],)](
            _rows(_dense_heads(key)),
            _rows(_dense_heads(value)),
            slots,
            _cache(cache, kv_heads, kv_scales),
            **sizes,
        )


def attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    options: ScoreOptions,
    out: torch.Tensor,
) -> None:
    """See `pagedattn.attend`."""
    plan = make_plan(query, cache, batch, options.window, describe_device(query.device))
    attend_by_plan(query, cache, batch, options, out, plan)


def attend_by_plan(
    query: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    options: ScoreOptions,
    out: torch.Tensor,
    plan: Plan,
) -> None:
    """`attend` with a plan of one's own."""
    query = _dense_heads(query)
    q_heads, head_dim = query.shape[1:]
    partials = _partials(query, plan) if plan.parts > 1 else None
    common = (
        partials,
        _rows(query),
        _cache(cache, q_heads, options.kv_scales),
        Sequences(batch.query_starts, batch.lengths, batch.block_table),
        _scoring(options),
        batch.block_table.stride(0),
        batch.num_seqs,
    )
    cuts = (plan.splits, plan.parts, plan.shared, plan.min_piece)
    with torch.cuda.device_of(query):
        if plan.prefix is not None:
            programs = prefix_query_tiles(plan, plan.prefix) * head_tiles(query, cache, plan.prefix)
            attend_prefix_kernel[(programs * plan.prefix_splits, cache.shape[2])](
                *common,
                plan.short_tokens,
                plan.prefix_splits,
                *cuts[1:],
                _tile(plan.prefix),
                **_launch_options(plan.prefix),
            )
        attend_kernel[(_programs(query, batch, cache, plan), cache.shape[2])](
            _rows(out),
            *common,
            plan.num_short,
            *cuts,
            None if plan.short is None else _tile(plan.short),
            None if plan.long is None else _tile(plan.long),
            # A mixed launch takes the options of prefills, whose products need the warps.
            **_launch_options(plan.long or plan.short),
        )
        if partials is not None:
            sizes: dict[str, Any] = {
                "HEAD_DIM": head_dim,
                "TILE_PARTS": MERGE_PARTS,
                "TILE_DIM": next_power_of_2(head_dim),
            }
            merge_kernel[(plan.short_tokens, q_heads)](
                _rows(out), partials, _float32(options.sinks), plan.parts, **sizes
            )


def _partials(query: torch.Tensor, plan: Plan) -> Partials:
    shape = (plan.short_tokens, query.shape[1], plan.parts)
    means = torch.empty((*shape, query.shape[2]), dtype=torch.float32, device=query.device)
    return Partials(means, torch.empty(shape, dtype=torch.float32, device=query.device))


def _launch_options(tiles: Tiles | None) -> dict[str, Any]:
    assert tiles is not None, "a batch has short or long sequences"
    return {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}


def _programs(query: torch.Tensor, batch: AttentionBatch, cache: torch.Tensor, plan: Plan) -> int:
    """Programs a KV head of `attend_kernel`."""
    programs = 0
    if plan.short is not None:
        programs = plan.num_short * plan.splits * head_tiles(query, cache, plan.short)
    if plan.long is not None:
        tokens = query.shape[0] - plan.short_tokens
        query_tiles = tokens // plan.long.queries + batch.num_seqs - plan.num_short
        programs += query_tiles * head_tiles(query, cache, plan.long)
    return programs


def _rows(tensor: torch.Tensor) -> Rows:
    return Rows(tensor, tensor.stride(0), tensor.stride(1))


def _cache(cache: torch.Tensor, heads: int, scales: torch.Tensor | None) -> Cache:
    _, _, kv_heads, block_size, head_dim = cache.shape
    fp8 = None
    if cache.dtype == FP8:
        # Triton accepts no float8_e4m3fn where the hardware has none, and bytes everywhere.
        cache = cache.view(torch.uint8)
        capability = describe_device(cache.device).capability
        fp8 = tl.constexpr("hardware" if capability >= HARDWARE_FP8 else "integer")
    scales = None if scales is None else scales.contiguous()
    sizes = (kv_heads, heads // kv_heads, block_size, head_dim)
    return Cache(cache, scales, *map(tl.constexpr, sizes), fp8)


def _scoring(options: ScoreOptions) -> Scoring:
    slopes, sinks = _float32(options.alibi_slopes), _float32(options.sinks)
    return Scoring(options.scale, options.soft_cap, options.window, slopes, sinks)


def _tile(tiles: Tiles) -> Tile:
    sizes = (tiles.queries, tiles.heads, tiles.rows, tiles.keys, tiles.head_dim)
    return Tile(*map(tl.constexpr, sizes))


def _dense_heads(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with head_dim contiguous, which the kernels take for granted."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _float32(per_head: torch.Tensor | None) -> torch.Tensor | None:
    return None if per_head is None else per_head.to(torch.float32).contiguous()


@memoize
def describe_device(device: torch.device) -> Device:
    """Describe `device` for plans; the interpreter's is one processor that can do least."""
    if device.type != "cuda":
        return Device((8, 0), 1)
    properties = torch.cuda.get_device_properties(device)
    return Device((properties.major, properties.minor), properties.multi_processor_count)
