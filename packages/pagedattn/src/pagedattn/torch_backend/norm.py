"""Normalisation in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `pagedattn.rms_norm`."""
    if residual is None:
        return _normalise(x, weight, eps)
    total = x + residual
    return _normalise(total, weight, eps), total


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `pagedattn.layer_norm`."""
    total = x if residual is None else x + residual
    out = F.layer_norm(total, total.shape[-1:], weight, bias, eps)
    return out if residual is None else (out, total)


def _normalise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.is_cuda and weight.dtype == x.dtype:
        return torch.rms_norm(x, x.shape[-1:], weight, eps)  # one kernel there, eight passes on a CPU
    # A norm makes no squared copy of x, which would cost more than the arithmetic.
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).mul_(weight).to(x.dtype)
