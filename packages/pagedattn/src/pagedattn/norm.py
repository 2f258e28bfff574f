"""RMS normalisation."""

from __future__ import annotations

from typing import overload

import torch


@overload
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: None = None) -> torch.Tensor: ...


@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]: ...


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in float32, rounded once to x's dtype.

    `x` is `[..., hidden]`, `weight` `[hidden]` of any float dtype (Gemma's 1 + w can be kept in float32).
    With `residual` (x's shape and dtype), returns the norm of x + residual, and x + residual, which is
    the next residual. (Zhang and Sennrich, https://arxiv.org/abs/1910.07467.)
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be [{x.shape[-1]}], not {list(weight.shape)}")
    if residual is None:
        return _normalise(x, weight, eps)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(f"residual is {list(residual.shape)} {residual.dtype}, x {list(x.shape)} {x.dtype}")
    total = x + residual
    return _normalise(total, weight, eps), total


def _normalise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.is_cuda and weight.dtype == x.dtype:
        return torch.rms_norm(x, x.shape[-1:], weight, eps)  # one kernel there, eight passes on a CPU
    # A norm makes no squared copy of x, which would cost more than the arithmetic.
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).mul_(weight).to(x.dtype)
