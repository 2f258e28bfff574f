"""Activations of feed-forward layers; gated ones are for gate and up projections in one matrix."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from pagedattn.backends import Activation, backend_of


def activation(x: torch.Tensor, kind: Activation, *, backend: str | None = None) -> torch.Tensor:
    """silu(x), gelu(x), by erf ("gelu") or tanh ("gelu_tanh"), or relu(x), of x's shape and dtype.

    Raises ValueError for another kind.
    """
    if kind not in get_args(Activation):
        raise ValueError(f"kind must be one of {', '.join(get_args(Activation))}, not {kind!r}")
    return backend_of(x.device, backend).activation(x, kind)


def silu_and_mul(x: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """silu(gate) · up, where `x [..., 2 n]` is gate and up side by side; `[..., n]` of x's dtype.

    Raises ValueError for an odd width.
    """
    _check_even(x)
    return backend_of(x.device, backend).silu_and_mul(x)


def gelu_and_mul(
    x: torch.Tensor, approximate: Literal["tanh", "none"] = "tanh", *, backend: str | None = None
) -> torch.Tensor:
    """gelu(gate) · up, where `x [..., 2 n]` is gate and up side by side; `[..., n]` of x's dtype.

    `approximate` is torch's: "tanh" (Gemma's gelu_pytorch_tanh) or "none", the exact erf form. Raises
    ValueError for another one and for an odd width.
    """
    _check_even(x)
    if approximate not in ("tanh", "none"):
        raise ValueError(f"approximate must be 'tanh' or 'none', not {approximate!r}")
    return backend_of(x.device, backend).gelu_and_mul(x, approximate)


def _check_even(x: torch.Tensor) -> None:
    if x.shape[-1] % 2:
        raise ValueError(f"gate and up side by side make an even width, not {x.shape[-1]}")
