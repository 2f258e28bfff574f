"""Settings that most families' config.json files have in common."""

from typing import Any

from enginecore.errors import ModelError
from enginecore.worker.models.spec import Activation, DecoderSpec, rope_spec

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def common_spec(config: dict[str, Any], **switches: Any) -> DecoderSpec:
    """Return the spec of a Llama with what `switches`, fields of DecoderSpec, say otherwise.

    Raises:
        KeyError: a size is missing.
        ModelError: the head counts do not fit together, or the rotary scaling is not supported.
    """
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    layers = config["num_hidden_layers"]
    fields: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": switches.get("intermediate_size") or config["intermediate_size"],
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "max_position": config["max_position_embeddings"],
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "windows": (None,) * layers,
    } | switches
    if "ropes" not in fields:
        rope = rope_spec(config, head_dim)
        fields["ropes"] = (rope,) * layers
        fields["max_position"] = max(fields["max_position"], rope.reach)
    if "activation" not in fields:
        fields["activation"] = activation(config, "hidden_act", ("silu", "swish"))
    spec = DecoderSpec(**fields)
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(
            f"num_attention_heads={spec.num_heads} is no multiple of num_key_value_heads={spec.num_kv_heads}"
        )
    return spec


def activation(config: dict[str, Any], key: str, allowed: tuple[str, ...]) -> Activation:
    """Return the activation that `config[key]` names, the first of `allowed` where nothing is named.

    Raises:
        ModelError: it is not one of `allowed`.
    """
    name = config.get(key) or allowed[0]
    if name not in allowed:
        raise ModelError(
            f"{key} {name!r} is not supported for this architecture (supported: {', '.join(allowed)})"
        )
    return _ACTIVATIONS[name]


def same_window(config: dict[str, Any], window: int | None) -> tuple[int | None, ...]:
    """Return `window` for every layer; 0 and None stand for none."""
    return (window or None,) * config["num_hidden_layers"]


def typed_windows(config: dict[str, Any], kinds: list[str]) -> tuple[int | None, ...]:
    """Return sliding_window for the layers whose kind is "sliding_attention", None for "full_attention".

    Raises:
        ModelError: there is not one kind a layer, or one is neither.
    """
    layers = config["num_hidden_layers"]
    if len(kinds) != layers:
        raise ModelError(f"layer_types has {len(kinds)} entries for {layers} layers")
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise ModelError(
            f"layer_types has {sorted(unknown)[0]!r} (supported: sliding_attention, full_attention)"
        )
    window = config.get("sliding_window") or None
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def refuse(config: dict[str, Any], **expected: Any) -> None:
    """Raise ModelError when a setting of `config` is there and not the one that is supported."""
    for key, value in expected.items():
        found = config.get(key)
        if found is not None and found != value:
            raise ModelError(f"{key}={found!r} is not supported for this architecture (supported: {value!r})")
