"""Gated activations of feed-forward layers whose gate and up projections are one matrix."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, where `x [..., 2 n]` is gate and up side by side; `[..., n]`."""
    gate, up = _halves(x)
    return F.silu(gate).mul_(up)


def gelu_and_mul(x: torch.Tensor, approximate: Literal["tanh", "none"] = "tanh") -> torch.Tensor:
    """gelu(gate) · up, where `x [..., 2 n]` is gate and up side by side; `[..., n]`.

    `approximate` is torch's: "tanh" (Gemma's gelu_pytorch_tanh) or "none", the exact erf form.
    """
    gate, up = _halves(x)
    return F.gelu(gate, approximate=approximate).mul_(up)


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if x.shape[-1] % 2:
        raise ValueError(f"gate and up side by side make an even width, not {x.shape[-1]}")
    gate, up = x.chunk(2, dim=-1)
    return gate, up
