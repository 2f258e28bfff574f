"""Norms of hidden states."""

import torch
from torch import Tensor, nn

from enginecore.worker.models.spec import DecoderSpec
from pagedattn import layer_norm, rms_norm


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich) over the last dimension."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        """`offset` is added to the checkpoint's weight; the sum is kept in float32."""
        super().__init__()
        dtype = torch.float32 if offset else None
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps = eps
        self.offset = offset

    def load_weight(self, weight: Tensor) -> None:
        """Take the checkpoint's weight [size]."""
        copy_checked(weight, self.weight)
        if self.offset:
            self.weight += self.offset

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., size] normalised."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return norm(x + residual) and x + residual; None adds nothing."""
        if residual is None:
            return self(x), x
        return rms_norm(x, self.weight, self.eps, residual)


class LayerNorm(nn.Module):
    """Layer norm (Ba et al.) over the last dimension, with weight and bias."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def load_weight(self, weight: Tensor) -> None:
        """Take the checkpoint's weight [size]."""
        copy_checked(weight, self.weight)

    def load_bias(self, bias: Tensor) -> None:
        """Take the checkpoint's bias [size]."""
        copy_checked(bias, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., size] normalised."""
        return layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return norm(x + residual) and x + residual; None adds nothing."""
        if residual is None:
            return self(x), x
        return layer_norm(x, self.weight, self.bias, self.eps, residual)


Norm = RMSNorm | LayerNorm


def hidden_norm(spec: DecoderSpec) -> Norm:
    """Return a norm of hidden states, not yet loaded."""
    if spec.norm == "layer":
        return LayerNorm(spec.hidden_size, spec.norm_eps)
    return RMSNorm(spec.hidden_size, spec.norm_eps, spec.norm_offset)


def copy_checked(source: Tensor, target: Tensor) -> None:
    """Copy `source` into the parameter `target`; ValueError when the shapes differ."""
    if source.shape != target.shape:
        raise ValueError(f"expected shape {list(target.shape)}, got {list(source.shape)}")
    target.copy_(source)
