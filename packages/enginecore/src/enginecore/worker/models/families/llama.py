"""Llama and the families that differ from it in a switch or two."""

from dataclasses import replace
from typing import Any

from enginecore.worker.models.families.settings import common_spec, same_window, typed_windows
from enginecore.worker.models.spec import DecoderSpec, TensorNames

_LAYER = "model.layers.{layer}."
_FUSED = TensorNames(
    {
        f"{_LAYER}self_attn.qkv_proj": tuple(f"{_LAYER}self_attn.{part}_proj" for part in "qkv"),
        f"{_LAYER}mlp.gate_up_proj": (f"{_LAYER}mlp.gate_proj", f"{_LAYER}mlp.up_proj"),
    }
)
"""Phi-3's projections."""


def llama(config: dict[str, Any]) -> DecoderSpec:
    """Llama 1 to 3 and what is built like it."""
    bias = bool(config.get("attention_bias", False))
    return common_spec(config, qkv_bias=bias, o_bias=bias, mlp_bias=bool(config.get("mlp_bias", False)))


def mistral(config: dict[str, Any]) -> DecoderSpec:
    """Mistral: one sliding window for all layers."""
    return common_spec(config, windows=same_window(config, config.get("sliding_window")))


def phi3(config: dict[str, Any]) -> DecoderSpec:
    """Phi-3 and Phi-4-mini: a sliding window, partial rotation, LongRoPE."""
    return replace(mistral({"rms_norm_eps": 1e-5, **config}), names=_FUSED)


def qwen2(config: dict[str, Any]) -> DecoderSpec:
    """Qwen2 and 2.5: biases on Q, K and V."""
    return common_spec(config, qkv_bias=True, windows=_qwen_windows(config))


def qwen3(config: dict[str, Any]) -> DecoderSpec:
    """Qwen3: normalised query and key heads."""
    bias = bool(config.get("attention_bias", False))
    return common_spec(config, qkv_bias=bias, o_bias=bias, qk_norm=True, windows=_qwen_windows(config))


def _qwen_windows(config: dict[str, Any]) -> tuple[int | None, ...]:
    if not config.get("use_sliding_window"):
        return same_window(config, None)
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", layers)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return typed_windows(config, kinds)
