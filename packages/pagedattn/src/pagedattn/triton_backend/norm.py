# ruff: noqa: ANN001, ANN201 (Triton infers the types of kernel arguments)
"""RMS normalisation in one Triton kernel, the residual's addition included."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# One program holds whole rows.
WIDEST = 1 << 16
TILE_ELEMENTS = 2048


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    out,
    total,
    x,
    residual,
    weight,
    rows,
    inner,
    eps,
    x_stride,
    x_inner_stride,
    residual_stride,
    residual_inner_stride,
    SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_SIZE: tl.constexpr,
):
    """Grid (row tiles). Row r of x lies at r // inner · x_stride + r % inner · x_inner_stride."""
    row = (tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS))[:, None]
    column = tl.arange(0, TILE_SIZE)[None, :]
    inside = (row < rows) & (column < SIZE)
    start = row // inner * x_stride + row % inner * x_inner_stride
    values = tl.load(x + start + column, mask=inside, other=0.0)
    if residual is not None:
        start = row // inner * residual_stride + row % inner * residual_inner_stride
        added = tl.load(residual + start + column, mask=inside, other=0.0)
        values = (values.to(tl.float32) + added.to(tl.float32)).to(values.dtype)
        tl.store(total + row * SIZE + column, values, mask=inside)
    values = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / SIZE + eps)
    weights = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    result = values * scale[:, None] * weights
    tl.store(out + row * SIZE + column, result.to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `pagedattn.rms_norm`. Raises ValueError for a hidden size above 65536."""
    size = x.shape[-1]
    if size > WIDEST:
        raise ValueError(f"the Triton back end normalises up to {WIDEST} elements, not {size}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(out)
    x = _walkable(x)
    residual = None if residual is None else _walkable(residual)
    added = x if residual is None else residual
    tile_size = triton.next_power_of_2(size)
    tile_rows = max(1, TILE_ELEMENTS // tile_size)
    rows = out.numel() // max(size, 1)
    constants: dict[str, Any] = {
        "SIZE": size,
        "TILE_ROWS": tile_rows,
        "TILE_SIZE": tile_size,
        "num_warps": max(1, min(16, tile_rows * tile_size // 512)),
    }
    with torch.cuda.device_of(out):
        rms_norm_kernel[(triton.cdiv(rows, tile_rows),)](
            out,
            total,
            x,
            residual,
            weight.contiguous(),
            rows,
            x.shape[1],
            eps,
            x.stride(0),
            x.stride(1),
            added.stride(0),
            added.stride(1),
            **constants,
        )
    return out if total is None else (out, total)


def _walkable(x: torch.Tensor) -> torch.Tensor:
    """`x` as `[outer, inner, hidden]` with contiguous rows, copied only where strides are in the way."""
    if x.stride(-1) != 1 or x.ndim > 3:
        x = x.contiguous()
    if x.ndim == 3:
        return x
    return x.view(1, 1, -1) if x.ndim == 1 else x.unsqueeze(1) if x.ndim == 2 else x.flatten(0, -3)
