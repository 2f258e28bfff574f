# ruff: noqa: ANN001, ANN201 (Triton infers the types of kernel arguments)
"""Gated activations in one Triton kernel; float32 inside, rounded once."""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl

TILE = 1024


@triton.jit
def gated_kernel(out, x, x_stride, width, ACTIVATION: tl.constexpr, TILE: tl.constexpr):
    """Grid (rows, column tiles). ACTIVATION is "silu", "tanh" or "none": the last two of gelu."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        weight = tl.sigmoid(gate)
    elif ACTIVATION == "tanh":
        # (1 + tanh(y)) / 2 = sigmoid(2 y), with y = sqrt(2 / pi) (x + 0.044715 x³)
        weight = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        weight = 0.5 + 0.5 * tl.erf(gate * 0.7071067811865476)
    result = gate * weight * up
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See `pagedattn.silu_and_mul`."""
    return _gated(x, "silu")


def gelu_and_mul(x: torch.Tensor, approximate: Literal["tanh", "none"]) -> torch.Tensor:
    """See `pagedattn.gelu_and_mul`."""
    return _gated(x, approximate)


def _gated(x: torch.Tensor, activation: str) -> torch.Tensor:
    width = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    constants: dict[str, Any] = {"ACTIVATION": activation, "TILE": TILE}
    with torch.cuda.device_of(out):
        gated_kernel[(rows.shape[0], triton.cdiv(width, TILE))](out, rows, rows.stride(0), width, **constants)
    return out
