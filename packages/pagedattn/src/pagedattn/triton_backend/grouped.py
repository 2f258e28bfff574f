# ruff: noqa: ANN001, ANN201 (Triton infers the types of kernel arguments)
"""Grouped matrix products in one Triton launch whose grid follows from shapes alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


@triton.jit
def expert_of_tile(starts, experts, tile, TILE_ROWS: tl.constexpr):
    """The expert that row tile number `tile` belongs to.

    Expert e owns the tiles from starts[e] // TILE_ROWS + e on: with one tile more than its rows fill, an
    expert always has enough.
    """
    low = 0
    high = experts
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // TILE_ROWS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["experts"])
def grouped_matmul_kernel(
    out,
    x,
    weight,
    starts,
    experts,
    x_stride,
    weight_expert_stride,
    weight_stride,
    out_size,
    in_size,
    TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
):
    """Grid (row tiles, out tiles)."""
    tile = tl.program_id(0)
    expert = expert_of_tile(starts, experts, tile, TILE_ROWS)
    start = tl.load(starts + expert).to(tl.int32)
    stop = tl.load(starts + expert + 1).to(tl.int32)
    first = start + (tile - start // TILE_ROWS - expert) * TILE_ROWS
    if first >= stop:
        return
    row = first + tl.arange(0, TILE_ROWS).to(tl.int64)
    column = tl.program_id(1) * TILE_OUT + tl.arange(0, TILE_OUT)
    depth = tl.arange(0, TILE_IN)
    rows = x + row[:, None] * x_stride + depth[None, :]
    columns = weight + expert.to(tl.int64) * weight_expert_stride
    columns += column[None, :].to(tl.int64) * weight_stride + depth[:, None]
    sums = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
    for begin in range(0, in_size, TILE_IN):
        deep = begin + depth < in_size
        left = tl.load(rows + begin, mask=(row < stop)[:, None] & deep[None, :], other=0.0)
        right = tl.load(columns + begin, mask=(column < out_size)[None, :] & deep[:, None], other=0.0)
        # Of float32: one TF32 product would lose half the digits, three lose next to none.
        sums = tl.dot(left, right, sums, input_precision="tf32x3")
    target = out + row[:, None] * out_size + column[None, :]
    inside = (row < stop)[:, None] & (column < out_size)[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=inside)


class Tiles(NamedTuple):
    """Tile sizes: rows, columns and summands that a program takes at a time."""

    rows: int
    out: int
    depth: int
    num_warps: int
    num_stages: int


def choose_tiles(rows: int, experts: int, itemsize: int, *, aligned: bool) -> Tiles:
    """Tiles for `rows` spread over `experts`: what they have on average should fill one.

    `aligned` tells whether rows start at multiples of 16 bytes. Others are loaded element by element, whose
    addresses take registers.
    """
    if not aligned:
        return Tiles(16 if rows <= 16 * experts else 32, 64, 32, 4, 2)
    if itemsize == 4:
        return Tiles(16, 64, 32, 4, 3) if rows <= 16 * experts else Tiles(64, 64, 32, 8, 2)
    if rows <= 16 * experts:
        return Tiles(16, 64, 128, 4, 4)
    return Tiles(64, 128, 64, 4, 4) if rows <= 64 * experts else Tiles(128, 128, 64, 8, 3)


def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """See `pagedattn.grouped_matmul`."""
    experts, out_size, in_size = weight.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = weight if weight.stride(2) == 1 else weight.contiguous()
    out = torch.empty((x.shape[0], out_size), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    itemsize = x.dtype.itemsize
    aligned = x.stride(0) * itemsize % 16 == 0 and weight.stride(1) * itemsize % 16 == 0
    tiles = choose_tiles(x.shape[0], experts, itemsize, aligned=aligned)
    grid = (x.shape[0] // tiles.rows + experts, triton.cdiv(out_size, tiles.out))
    constants: dict[str, Any] = {
        "TILE_ROWS": tiles.rows,
        "TILE_OUT": tiles.out,
        "TILE_IN": tiles.depth,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
    with torch.cuda.device_of(x):
        grouped_matmul_kernel[grid](
            out,
            x,
            weight,
            starts.contiguous(),
            experts,
            x.stride(0),
            weight.stride(0),
            weight.stride(1),
            out_size,
            in_size,
            **constants,
        )
    return out
