"""Decoder specification: the sizes and switches in which the model families differ."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from enginecore.errors import ModelError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (Su et al., RoFormer) and the way its frequencies are stretched."""

    dim: int
    """Rotated channels of a head; the rest pass through."""
    theta: float
    kind: str = "default"
    parameters: dict[str, Any] = field(default_factory=dict)
    """Settings of `kind`, by the names that config.json gives them."""

    @property
    def reach(self) -> int:
        """Positions to which `kind` stretches the original length; 0 where config.json says how many."""
        if self.kind not in ("linear", "dynamic", "yarn"):
            return 0
        return int(self.parameters["original_max_position_embeddings"] * self.parameters["factor"])


@dataclass(frozen=True)
class ExpertSpec:
    """A mixture of experts in the place of a feed-forward network (Shazeer et al., Sparsely-Gated MoE)."""

    count: int
    top_k: int
    """Experts that each token goes to."""
    intermediate_size: int
    """Inner features of one expert."""
    normalise: bool
    """Whether the weights of a token's experts are scaled to sum to 1."""
    layers: frozenset[int]
    """The layers that have experts."""


@dataclass(frozen=True)
class TensorNames:
    """A checkpoint's names for its modules, as a table from these to Llama's names.

    `{layer}` stands for a number, of a layer or an expert, and `{expert}` likewise; each may stand once on
    either side. A module that is not in the table has Llama's name already.
    """

    modules: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """Llama's name by the checkpoint's, without ".weight" or ".bias"; of fused modules, all in order."""
    transposed: frozenset[str] = frozenset()
    """Names, as in `modules`, of those whose weights are stored [in, out]."""
    prefix: str = ""
    """A beginning that names may have or lack."""


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only transformer."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    ropes: tuple[RopeSpec | None, ...]
    """Rotary embedding of each layer; None for layers that rotate nothing."""
    max_position: int
    """Positions the checkpoint was made for: the default of max_model_len."""
    windows: tuple[int | None, ...]
    """Sliding window of each layer in tokens; None attends to everything before."""
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    norm: Literal["rms", "layer"] = "rms"
    """RMS norm with a weight, or layer norm with weight and bias."""
    norm_offset: float = 0.0
    """Added to the weights of RMS norms (Gemma stores them less 1)."""
    output_norms: bool = False
    """Whether attention and feed-forward outputs are normalised before they are added (Gemma 2 and 3)."""
    qk_norm: bool = False
    """Whether each query and key head is RMS-normalised before rotation (Qwen3, Gemma 3)."""
    attention_scale: float | None = None
    """Factor on attention scores; None for head_dim ** -0.5."""
    attention_cap: float | None = None
    """Soft cap c of attention scores, c · tanh(score / c) (Gemma 2)."""
    logit_cap: float | None = None
    """Soft cap of the logits (Gemma 2)."""
    activation: Activation = "silu"
    gated: bool = True
    """Whether the feed-forward network multiplies by a second projection (Shazeer, GLU variants)."""
    scale_embeddings: bool = False
    """Whether embeddings are multiplied by sqrt(hidden_size) (Gemma)."""
    learned_positions: bool = False
    """Whether a learned vector per position is added to the embeddings (GPT-2)."""
    experts: ExpertSpec | None = None
    names: TensorNames = field(default_factory=TensorNames)
    """The checkpoint's tensor names, where they are not Llama's."""

    @property
    def dynamic_length(self) -> int | None:
        """Tokens beyond which a sequence's length decides its rotation (dynamic NTK); None: never."""
        lengths = [
            rope.parameters["original_max_position_embeddings"]
            for rope in self.ropes
            if rope is not None and rope.kind == "dynamic"
        ]
        return min(lengths, default=None)


def rope_spec(config: dict[str, Any], head_dim: int) -> RopeSpec:
    """Read the rotary settings of a config.json, in the layout of transformers 5 or the older one.

    Raises:
        ModelError: the kind of scaling is not one of those supported.
    """
    new = config.get("rope_parameters") or {}
    old = config.get("rope_scaling") or {}
    parameters = {**old, **new}
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    theta = float(parameters.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    partial = parameters.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if kind == "su" or (kind == "yarn" and "short_factor" in parameters):
        kind = "longrope"  # what Phi-3's first files call it
    if kind not in ROPE_KINDS:
        raise ModelError(f"rope scaling {kind!r} is not supported (supported: {', '.join(ROPE_KINDS)})")
    if kind in ("linear", "dynamic"):
        # Where these are set, max_position_embeddings stays what the model was trained with.
        parameters["original_max_position_embeddings"] = config["max_position_embeddings"]
    if kind in ("yarn", "llama3", "longrope"):
        original = parameters.get("original_max_position_embeddings")
        original = original or config.get("original_max_position_embeddings")
        parameters["original_max_position_embeddings"] = original or config["max_position_embeddings"]
    if kind == "longrope" and parameters.get("factor") is None:
        stretch = config["max_position_embeddings"] / parameters["original_max_position_embeddings"]
        parameters["factor"] = stretch
    missing = [name for name in ROPE_KINDS[kind] if parameters.get(name) is None]
    if missing:
        raise ModelError(f"rope scaling {kind!r} needs {missing[0]}, which config.json does not give")
    dim = int(head_dim * partial)
    for name in ("short_factor", "long_factor", "factors"):
        if name in ROPE_KINDS[kind] and len(parameters[name]) != dim // 2:
            raise ModelError(
                f"rope scaling {kind!r}: {name} has {len(parameters[name])} entries, "
                f"not one for each pair of the {dim} rotated channels"
            )
    return RopeSpec(dim, theta, kind, parameters)


ROPE_KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "factors": ("factors",),
}
"""Kinds of frequency scaling, each with the settings it cannot do without."""
