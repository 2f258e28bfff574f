"""RMS and layer normalisation."""

from __future__ import annotations

from typing import overload

import torch

from pagedattn.backends import backend_of


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor: ...


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in float32, rounded once to x's dtype.

    `x` is `[..., hidden]`, `weight` `[hidden]` of any float dtype (Gemma's 1 + w can be kept in float32).
    With `residual` (x's shape and dtype), returns the norm of x + residual, and x + residual, which is
    the next residual. (Zhang and Sennrich, https://arxiv.org/abs/1910.07467.)

    Raises ValueError when shapes or dtypes do not fit together.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be [{x.shape[-1]}], not {list(weight.shape)}")
    _check_residual(x, residual)
    return backend_of(x.device, backend).rms_norm(x, weight, eps, residual)


@overload
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    residual: None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor: ...


@overload
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    residual: torch.Tensor,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """(x - mean(x)) / sqrt(var(x) + eps) · weight + bias over the last dimension, in float32, rounded once.

    `x` is `[..., hidden]`, `weight` and `bias` `[hidden]` of its dtype. With `residual` (x's shape and
    dtype), returns the norm of x + residual, and x + residual. (Ba et al., https://arxiv.org/abs/1607.06450.)

    Raises ValueError when shapes or dtypes do not fit together.
    """
    for name, given in (("weight", weight), ("bias", bias)):
        if given.shape != x.shape[-1:]:
            raise ValueError(f"{name} must be [{x.shape[-1]}], not {list(given.shape)}")
    _check_residual(x, residual)
    return backend_of(x.device, backend).layer_norm(x, weight, bias, eps, residual)


def _check_residual(x: torch.Tensor, residual: torch.Tensor | None) -> None:
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(f"residual is {list(residual.shape)} {residual.dtype}, x {list(x.shape)} {x.dtype}")
