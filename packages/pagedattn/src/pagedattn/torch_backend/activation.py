"""Activations in plain torch."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from pagedattn.backends import Activation


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See `pagedattn.silu_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(x: torch.Tensor, approximate: Literal["tanh", "none"]) -> torch.Tensor:
    """See `pagedattn.gelu_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate).mul_(up)


def activation(x: torch.Tensor, kind: Activation) -> torch.Tensor:
    """See `pagedattn.activation`."""
    match kind:
        case "silu":
            return F.silu(x)
        case "relu":
            return F.relu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
