"""One layer of a decoder.

Tokens of all sequences in a step lie one after another in one dimension; only attention knows which
sequence a token belongs to.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from collectives import ColumnParallelLinear, RowParallelLinear
from enginecore.worker.models.attention import Attention
from enginecore.worker.models.experts import SparseFeedForward
from enginecore.worker.models.feed_forward import FeedForward
from enginecore.worker.models.norms import LayerNorm, Norm, hidden_norm
from enginecore.worker.models.parallel import ModelParallel
from enginecore.worker.models.rope import Rotation
from enginecore.worker.models.spec import DecoderSpec
from pagedattn import AttentionBatch

Loader = Callable[[Tensor], None]


class Layer(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, spec: DecoderSpec, index: int, parallel: ModelParallel) -> None:
        super().__init__()
        self.input_norm = hidden_norm(spec)
        self.attention = Attention(spec, spec.windows[index], parallel.tp)
        self.attention_output_norm = hidden_norm(spec) if spec.output_norms else None
        self.mlp_input_norm = hidden_norm(spec)
        self.mlp: FeedForward | SparseFeedForward
        if spec.experts is not None and index in spec.experts.layers:
            self.mlp = SparseFeedForward(spec, spec.experts, parallel, index)
        else:
            self.mlp = FeedForward(spec, parallel.tp)
        self.mlp_output_norm = hidden_norm(spec) if spec.output_norms else None

    @property
    def step_width(self) -> int:
        """Elements for each token that are held at most between two operations of this rank."""
        between = max(self.attention.step_width, self.mlp.step_width)
        return 4 * self.input_norm.weight.shape[0] + between

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotation: Rotation | None,
        cache: Tensor,
        batch: AttentionBatch,
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's output, not yet added, and the residual stream, both [tokens, hidden].

        The stream is x itself where there is no `residual` yet.
        """
        normed, residual = self.input_norm.add(x, residual)
        mixed = self.attention(normed, rotation, cache, batch)
        if self.attention_output_norm is not None:
            mixed = self.attention_output_norm(mixed)
        normed, residual = self.mlp_input_norm.add(mixed, residual)
        out = self.mlp(normed)
        return (out if self.mlp_output_norm is None else self.mlp_output_norm(out)), residual

    def loaders(self) -> dict[str, Loader]:
        """Return, by name within the layer of a Llama checkpoint, where each tensor goes."""
        attention = self.attention
        found: dict[str, Loader] = {
            **norm_loaders(self.input_norm, "input_layernorm"),
            **_column(attention.qkv, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            **_row(attention.o, "self_attn.o_proj"),
        }
        if attention.q_norm is not None and attention.k_norm is not None:
            found |= norm_loaders(attention.q_norm, "self_attn.q_norm")
            found |= norm_loaders(attention.k_norm, "self_attn.k_norm")
        if self.attention_output_norm is not None and self.mlp_output_norm is not None:
            found |= norm_loaders(self.attention_output_norm, "post_attention_layernorm")
            found |= norm_loaders(self.mlp_input_norm, "pre_feedforward_layernorm")
            found |= norm_loaders(self.mlp_output_norm, "post_feedforward_layernorm")
        else:
            found |= norm_loaders(self.mlp_input_norm, "post_attention_layernorm")
        return found | self._mlp_loaders()

    def _mlp_loaders(self) -> dict[str, Loader]:
        mlp = self.mlp
        if isinstance(mlp, SparseFeedForward):
            return {f"mlp.{name}": to for name, to in mlp.loaders().items()}
        names = ("mlp.gate_proj", "mlp.up_proj") if len(mlp.up.parts) == 2 else ("mlp.up_proj",)
        return {**_column(mlp.up, *names), **_row(mlp.down, "mlp.down_proj")}


def norm_loaders(norm: Norm, name: str) -> dict[str, Loader]:
    """Return where the tensors of the norm `name` go."""
    found: dict[str, Loader] = {f"{name}.weight": norm.load_weight}
    if isinstance(norm, LayerNorm):
        found[f"{name}.bias"] = norm.load_bias
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
