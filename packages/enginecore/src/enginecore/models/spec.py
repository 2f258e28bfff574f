"""What a decoder is: the sizes and switches in which the model families differ."""

from dataclasses import dataclass, field
from typing import Any, Literal

from enginecore.errors import ModelError


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (Su et al., RoFormer) and the way its frequencies are stretched."""

    dim: int
    """Rotated channels of a head; the rest pass through."""
    theta: float
    kind: str = "default"
    parameters: dict[str, Any] = field(default_factory=dict)
    """Settings of `kind`, by the names that config.json gives them."""


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only transformer with rotary positions, RMS norms and a gated MLP."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    max_position: int
    """Positions the checkpoint was made for: the default of max_model_len."""
    windows: tuple[int | None, ...]
    """Sliding window of each layer in tokens; None attends to everything before."""
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each query and key head is RMS-normalised before rotation (Qwen3)."""
    activation: Literal["silu"] = "silu"


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
    if kind not in ROPE_KINDS:
        raise ModelError(f"rope scaling {kind!r} is not supported (supported: {', '.join(ROPE_KINDS)})")
    if kind in ("yarn", "llama3"):
        original = parameters.get("original_max_position_embeddings")
        parameters["original_max_position_embeddings"] = original or config["max_position_embeddings"]
    missing = [name for name in ROPE_KINDS[kind] if parameters.get(name) is None]
    if missing:
        raise ModelError(f"rope scaling {kind!r} needs {missing[0]}, which config.json does not give")
    return RopeSpec(int(head_dim * partial), theta, kind, parameters)


ROPE_KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "factors": ("factors",),
}
"""Kinds of frequency scaling, each with the settings it cannot do without."""
