"""GPT-2."""

from typing import Any

from enginecore.worker.models.families.settings import activation, common_spec, refuse
from enginecore.worker.models.spec import DecoderSpec, TensorNames

_PRODUCTS = {
    "h.{layer}.attn.c_attn": tuple(f"model.layers.{{layer}}.self_attn.{part}_proj" for part in "qkv"),
    "h.{layer}.attn.c_proj": "model.layers.{layer}.self_attn.o_proj",
    "h.{layer}.mlp.c_fc": "model.layers.{layer}.mlp.up_proj",
    "h.{layer}.mlp.c_proj": "model.layers.{layer}.mlp.down_proj",
}
_NAMES = TensorNames(
    {
        "wte": "model.embed_tokens",
        "wpe": "model.position_embeddings",
        "ln_f": "model.norm",
        "h.{layer}.ln_1": "model.layers.{layer}.input_layernorm",
        "h.{layer}.ln_2": "model.layers.{layer}.post_attention_layernorm",
        **_PRODUCTS,
    },
    transposed=frozenset(_PRODUCTS),
    prefix="transformer.",
)

_SIZES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}


def gpt2(config: dict[str, Any]) -> DecoderSpec:
    """GPT-2: layer norms, learned positions, biases everywhere, a feed-forward network without gate."""
    refuse(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    config = config | {ours: config[theirs] for theirs, ours in _SIZES.items() if theirs in config}
    return common_spec(
        config,
        intermediate_size=config.get("n_inner") or 4 * config["hidden_size"],
        ropes=(None,) * config["num_hidden_layers"],
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        norm="layer",
        activation=activation(
            config, "activation_function", ("gelu_new", "gelu_pytorch_tanh", "gelu", "relu", "silu")
        ),
        gated=False,
        learned_positions=True,
        names=_NAMES,
    )
