"""From a config.json to a DecoderSpec, for each supported architecture."""

from collections.abc import Callable
from typing import Any

from enginecore.errors import ModelError
from enginecore.models.spec import DecoderSpec, rope_spec


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    """Return the decoder that `config` describes.

    Raises:
        ModelError: the architecture or one of its settings is not supported.
    """
    architectures = config.get("architectures") or []
    for name in architectures:
        if name in _FAMILIES:
            return _FAMILIES[name](config)
    named = ", ".join(architectures) or config.get("model_type") or "none named"
    raise ModelError(f"architecture {named} is not supported (supported: {', '.join(_FAMILIES)})")


def _llama(config: dict[str, Any]) -> DecoderSpec:
    bias = bool(config.get("attention_bias", False))
    return _spec(config, qkv_bias=bias, o_bias=bias, mlp_bias=bool(config.get("mlp_bias", False)))


def _mistral(config: dict[str, Any]) -> DecoderSpec:
    return _spec(config, windows=_same_window(config, config.get("sliding_window")))


def _qwen2(config: dict[str, Any]) -> DecoderSpec:
    return _spec(config, qkv_bias=True, windows=_qwen_windows(config))


def _qwen3(config: dict[str, Any]) -> DecoderSpec:
    bias = bool(config.get("attention_bias", False))
    return _spec(config, qkv_bias=bias, o_bias=bias, qk_norm=True, windows=_qwen_windows(config))


_FAMILIES: dict[str, Callable[[dict[str, Any]], DecoderSpec]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}


def _spec(config: dict[str, Any], **switches: Any) -> DecoderSpec:
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"hidden_act {config['hidden_act']!r} is not supported for this architecture")
    try:
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        layers = config["num_hidden_layers"]
        spec = DecoderSpec(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope=rope_spec(config, head_dim),
            max_position=config["max_position_embeddings"],
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            **{"windows": (None,) * layers, **switches},
        )
    except KeyError as error:
        raise ModelError(f"config.json lacks {error.args[0]}") from None
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(
            f"num_attention_heads={spec.num_heads} is no multiple of num_key_value_heads={spec.num_kv_heads}"
        )
    return spec


def _same_window(config: dict[str, Any], window: int | None) -> tuple[int | None, ...]:
    return (window or None,) * config["num_hidden_layers"]


def _qwen_windows(config: dict[str, Any]) -> tuple[int | None, ...]:
    if not config.get("use_sliding_window"):
        return _same_window(config, None)
    layers = config["num_hidden_layers"]
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", layers)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
