"""The parts of a decoder layer.

Tokens of all sequences in a step lie one after another in one dimension; only attention knows which
sequence a token belongs to.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from collectives import ColumnParallelLinear, Communicator, RowParallelLinear
from enginecore.models.spec import DecoderSpec
from pagedattn import AttentionBatch, attend, rms_norm, rotary, silu_and_mul, write_kv

Loader = Callable[[Tensor], None]


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich) over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def load_weight(self, weight: Tensor) -> None:
        """Take the checkpoint's weight [size]."""
        if weight.shape != self.weight.shape:
            raise ValueError(f"expected shape {tuple(self.weight.shape)}, got {tuple(weight.shape)}")
        self.weight.copy_(weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., size] normalised."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return norm(x + residual) and x + residual."""
        return rms_norm(x, self.weight, self.eps, residual)


class Attention(nn.Module):
    """Self-attention over the paged cache: fused QKV projection, rotation, output projection."""

    def __init__(self, spec: DecoderSpec, window: int | None, comm: Communicator) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.window = window
        self.scale = spec.head_dim**-0.5
        heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.qkv = ColumnParallelLinear(
            spec.hidden_size,
            [count * spec.head_dim for count in heads],
            units=heads,
            bias=spec.qkv_bias,
            comm=comm,
        )
        self.o = RowParallelLinear(
            spec.num_heads * spec.head_dim,
            spec.hidden_size,
            units=spec.num_heads,
            bias=spec.o_bias,
            comm=comm,
        )
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None

    def forward(self, x: Tensor, rotation: Tensor, cache: Tensor, batch: AttentionBatch) -> Tensor:
        """Return the attention output of x [tokens, hidden], writing its keys and values to `cache`.

        `rotation` [tokens, rotary_dim] holds the cosines and sines of the tokens' positions.
        """
        tokens = x.shape[0]
        query, key, value = (
            part.view(tokens, -1, self.head_dim) for part in self.qkv(x).split(self.qkv.local_parts, dim=-1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotary(query, key, None, rotation)
        write_kv(key, value, cache, batch.slots)
        mixed = attend(query, cache, batch, scale=self.scale, window=self.window)
        return self.o(mixed.reshape(tokens, -1))


class GatedMLP(nn.Module):
    """Gated feed-forward (Shazeer, GLU variants): down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: DecoderSpec, comm: Communicator) -> None:
        super().__init__()
        inner = spec.intermediate_size
        self.gate_up = ColumnParallelLinear(spec.hidden_size, [inner, inner], bias=spec.mlp_bias, comm=comm)
        self.down = RowParallelLinear(inner, spec.hidden_size, bias=spec.mlp_bias, comm=comm)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [tokens, hidden] put through the network."""
        return self.down(silu_and_mul(self.gate_up(x)))


class Layer(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, spec: DecoderSpec, window: int | None, comm: Communicator) -> None:
        super().__init__()
        self.input_norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.attention = Attention(spec, window, comm)
        self.post_norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.mlp = GatedMLP(spec, comm)

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        rotation: Tensor,
        cache: Tensor,
        batch: AttentionBatch,
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's output, not yet added, and the residual stream, both [tokens, hidden]."""
        normed, residual = self.input_norm.add(x, residual)
        mixed = self.attention(normed, rotation, cache, batch)
        normed, residual = self.post_norm.add(mixed, residual)
        return self.mlp(normed), residual

    def loaders(self) -> dict[str, Loader]:
        """Return, by name within the layer of a Hugging Face checkpoint, where each tensor goes."""
        attention, mlp = self.attention, self.mlp
        found: dict[str, Loader] = {
            "input_layernorm.weight": self.input_norm.load_weight,
            "post_attention_layernorm.weight": self.post_norm.load_weight,
            **_column(attention.qkv, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            **_row(attention.o, "self_attn.o_proj"),
            **_column(mlp.gate_up, "mlp.gate_proj", "mlp.up_proj"),
            **_row(mlp.down, "mlp.down_proj"),
        }
        if attention.q_norm is not None and attention.k_norm is not None:
            found["self_attn.q_norm.weight"] = attention.q_norm.load_weight
            found["self_attn.k_norm.weight"] = attention.k_norm.load_weight
        return found


def _column(linear: ColumnParallelLinear, *names: str) -> dict[str, Loader]:
    found: dict[str, Loader] = {}
    for part, name in enumerate(names):
        found[f"{name}.weight"] = partial(linear.load_weight, part=part)
        if linear.bias is not None:
            found[f"{name}.bias"] = partial(linear.load_bias, part=part)
    return found


def _row(linear: RowParallelLinear, name: str) -> dict[str, Loader]:
    found: dict[str, Loader] = {f"{name}.weight": linear.load_weight}
    if linear.bias is not None:
        found[f"{name}.bias"] = linear.load_bias
    return found
