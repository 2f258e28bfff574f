# ruff: noqa: ANN001, ANN201 (Triton infers the types of kernel arguments)
"""Rotary position embedding of queries and keys in one Triton launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

TILE_ELEMENTS = 1024


@triton.jit
def turn(
    out,
    x,
    stride,
    head_stride,
    token,
    first_head,
    cos,
    sin,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_HALF: tl.constexpr,
    TILE_REST: tl.constexpr,
):
    """Turns TILE_HEADS heads of one token from `first_head` on by `cos`, `sin [TILE_HALF]`."""
    head = first_head + tl.arange(0, TILE_HEADS)[:, None]
    pair = tl.arange(0, TILE_HALF)[None, :]
    inside = (head < HEADS) & (pair < HALF)
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + HALF
    source = x + token * stride + head * head_stride
    target = out + (token * HEADS + head) * HEAD_DIM
    real = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
    imaginary = tl.load(source + second, mask=inside, other=0.0).to(tl.float32)
    turned = real * cos[None, :] - imaginary * sin[None, :]
    tl.store(target + first, turned.to(out.dtype.element_ty), mask=inside)
    turned = imaginary * cos[None, :] + real * sin[None, :]
    tl.store(target + second, turned.to(out.dtype.element_ty), mask=inside)
    if HEAD_DIM > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, TILE_REST)[None, :]
        inside = (head < HEADS) & (rest < HEAD_DIM)
        tl.store(target + rest, tl.load(source + rest, mask=inside), mask=inside)


@triton.jit
def rotary_kernel(
    query_out,
    key_out,
    query,
    key,
    positions,
    cos_sin,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    row_stride,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_HALF: tl.constexpr,
    TILE_REST: tl.constexpr,
):
    """Grid (tokens, head tiles of the queries, then of the keys)."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    row = token
    if positions is not None:
        row = tl.load(positions + token).to(tl.int64)
    pair = tl.arange(0, TILE_HALF)
    angles = cos_sin + row * row_stride + pair
    cos = tl.load(angles, mask=pair < HALF, other=0.0).to(tl.float32)
    sin = tl.load(angles + HALF, mask=pair < HALF, other=0.0).to(tl.float32)
    query_tiles: tl.constexpr = (QUERY_HEADS + TILE_HEADS - 1) // TILE_HEADS
    if tile < query_tiles:
        turn(
            query_out,
            query,
            query_stride,
            query_head_stride,
            token,
            tile * TILE_HEADS,
            cos,
            sin,
            QUERY_HEADS,
            HEAD_DIM,
            HALF,
            INTERLEAVED,
            TILE_HEADS,
            TILE_HALF,
            TILE_REST,
        )
    else:
        turn(
            key_out,
            key,
            key_stride,
            key_head_stride,
            token,
            (tile - query_tiles) * TILE_HEADS,
            cos,
            sin,
            KEY_HEADS,
            HEAD_DIM,
            HALF,
            INTERLEAVED,
            TILE_HEADS,
            TILE_HALF,
            TILE_REST,
        )


def rotary(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `pagedattn.rotary`; the arithmetic is float32 whatever the tensors' types."""
    tokens, query_heads, head_dim = query.shape
    key_heads, half = key.shape[1], cos_sin.shape[1] // 2
    query, key, cos_sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, cos_sin))
    query_out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    key_out = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    tile_half = triton.next_power_of_2(half)
    tile_heads = triton.next_power_of_2(max(query_heads, key_heads))
    tile_heads = min(tile_heads, max(1, TILE_ELEMENTS // tile_half))
    tiles = triton.cdiv(query_heads, tile_heads) + triton.cdiv(key_heads, tile_heads)
    constants: dict[str, Any] = {
        "QUERY_HEADS": query_heads,
        "KEY_HEADS": key_heads,
        "HEAD_DIM": head_dim,
        "HALF": half,
        "INTERLEAVED": interleaved,
        "TILE_HEADS": tile_heads,
        "TILE_HALF": tile_half,
        "TILE_REST": triton.next_power_of_2(max(1, head_dim - 2 * half)),
        "num_warps": max(1, min(4, tile_heads * tile_half // 128)),
    }
    with torch.cuda.device_of(query):
        rotary_kernel[(tokens, tiles)](
            query_out,
            key_out,
            query,
            key,
            None if positions is None else positions.contiguous(),
            cos_sin,
            query.stride(0),
            query.stride(1),
            key.stride(0),
            key.stride(1),
            cos_sin.stride(0),
            **constants,
        )
    return query_out, key_out
