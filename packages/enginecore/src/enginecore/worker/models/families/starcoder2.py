"""StarCoder2; docs/add-a-family.md explains it line by line."""

from typing import Any

from enginecore.worker.models.families.settings import activation, common_spec, same_window
from enginecore.worker.models.spec import DecoderSpec, TensorNames

_NAMES = TensorNames(
    {
        "model.layers.{layer}.mlp.c_fc": "model.layers.{layer}.mlp.up_proj",
        "model.layers.{layer}.mlp.c_proj": "model.layers.{layer}.mlp.down_proj",
    }
)


def starcoder2(config: dict[str, Any]) -> DecoderSpec:
    """StarCoder2: layer norms, biases everywhere, a feed-forward network without gate, a sliding window."""
    bias = bool(config.get("use_bias", True))
    return common_spec(
        config,
        norm="layer",
        norm_eps=config.get("norm_epsilon", 1e-5),
        activation=activation(config, "hidden_act", ("gelu_pytorch_tanh", "gelu_new", "gelu")),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        windows=same_window(config, config.get("sliding_window")),
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        names=_NAMES,
    )
