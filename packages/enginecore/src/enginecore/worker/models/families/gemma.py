"""Gemma 1 to 3, text only."""

from typing import Any

from enginecore.errors import ModelError
from enginecore.worker.models.families.settings import activation, common_spec, refuse, typed_windows
from enginecore.worker.models.spec import DecoderSpec, rope_spec

_ACTIVATIONS = ("gelu_pytorch_tanh", "gelu_new", "gelu")


def gemma(config: dict[str, Any]) -> DecoderSpec:
    """Gemma: norms stored less 1, scaled embeddings, a feed-forward network gated by GELU."""
    config = {"head_dim": 256, **config}
    if config.get("hidden_activation") is None and config.get("hidden_act") in (None, "gelu"):
        # The first release's files name the exact GELU, and mean the approximation it was trained with.
        config["hidden_activation"] = "gelu_pytorch_tanh"
    key = "hidden_act" if config.get("hidden_activation") is None else "hidden_activation"
    return _spec(config, key)


def gemma2(config: dict[str, Any]) -> DecoderSpec:
    """Gemma 2: also norms after attention and feed-forward, soft caps, windows in every other layer."""
    config = {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        **config,
    }
    return _spec(
        config,
        "hidden_activation",
        windows=typed_windows(config, _layer_types(config, pattern=2)),
        attention_cap=config["attn_logit_softcapping"],
        **_norms_and_scale(config),
    )


def gemma3(config: dict[str, Any]) -> DecoderSpec:
    """Gemma 3: also normalised query and key heads, and other rotary angles where there is a window."""
    config = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, **config}
    kinds = _layer_types(config, pattern=config.get("sliding_window_pattern") or 6)
    ropes = {kind: rope_spec(_rope_config(config, kind), config["head_dim"]) for kind in set(kinds)}
    return _spec(
        config,
        "hidden_activation",
        windows=typed_windows(config, kinds),
        ropes=tuple(ropes[kind] for kind in kinds),
        qk_norm=True,
        **_norms_and_scale(config),
    )


def _spec(config: dict[str, Any], activation_key: str, **switches: Any) -> DecoderSpec:
    refuse(config, use_bidirectional_attention=False)
    bias = bool(config.get("attention_bias", False))
    return common_spec(
        config,
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        qkv_bias=bias,
        o_bias=bias,
        norm_offset=1.0,
        activation=activation(config, activation_key, _ACTIVATIONS),
        scale_embeddings=True,
        **switches,
    )


def _norms_and_scale(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "output_norms": True,
        "attention_scale": config["query_pre_attn_scalar"] ** -0.5,
        "logit_cap": config.get("final_logit_softcapping"),
    }


def _layer_types(config: dict[str, Any], pattern: int) -> list[str]:
    """Return each layer's kind; where the file does not say, every `pattern`-th attends to everything."""
    return config.get("layer_types") or [
        "sliding_attention" if (i + 1) % pattern else "full_attention"
        for i in range(config["num_hidden_layers"])
    ]


def _rope_config(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return a configuration with the rotary settings of one kind of layer alone.

    Files of transformers 5 have settings by kind; older ones scale full layers only.
    """
    if kind not in ("sliding_attention", "full_attention"):
        raise ModelError(f"layer_types has {kind!r} (supported: sliding_attention, full_attention)")
    full = kind == "full_attention"
    theta = config.get("rope_theta" if full else "rope_local_base_freq") or (1e6 if full else 1e4)
    return {
        "rope_theta": theta,
        "rope_parameters": (config.get("rope_parameters") or {}).get(kind),
        "rope_scaling": config.get("rope_scaling") if full else None,
        "max_position_embeddings": config["max_position_embeddings"],
    }
