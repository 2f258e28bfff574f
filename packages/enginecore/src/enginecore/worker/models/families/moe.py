"""Families with a mixture of experts."""

from typing import Any

from enginecore.errors import ModelError
from enginecore.worker.models.families.settings import common_spec, same_window
from enginecore.worker.models.spec import DecoderSpec, ExpertSpec, TensorNames

_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_BLOCK, _EXPERTS = "model.layers.{layer}.block_sparse_moe", "model.layers.{layer}.mlp"
_MIXTRAL_NAMES = TensorNames(
    {
        f"{_BLOCK}.gate": f"{_EXPERTS}.gate",
        **{
            f"{_BLOCK}.experts.{{expert}}.{w}": f"{_EXPERTS}.experts.{{expert}}.{n}"
            for w, n in _MIXTRAL.items()
        },
    }
)


def mixtral(config: dict[str, Any]) -> DecoderSpec:
    """Mixtral: a Mistral with experts in every layer."""
    config = {"rms_norm_eps": 1e-5, **config}
    every = frozenset(range(config["num_hidden_layers"]))
    return common_spec(
        config,
        windows=same_window(config, config.get("sliding_window")),
        experts=_experts(config, config["intermediate_size"], normalise=True, layers=every),
        names=_MIXTRAL_NAMES,
    )


def qwen3_moe(config: dict[str, Any]) -> DecoderSpec:
    """Qwen3 with experts, in all layers or some."""
    bias = bool(config.get("attention_bias", False))
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
    sparse = [i for i in range(config["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0]
    return common_spec(
        config,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        windows=same_window(config, window),
        experts=_experts(
            config,
            config["moe_intermediate_size"],
            normalise=bool(config.get("norm_topk_prob", False)),
            layers=frozenset(sparse),
        ),
    )


def _experts(
    config: dict[str, Any], intermediate_size: int, *, normalise: bool, layers: frozenset[int]
) -> ExpertSpec | None:
    count, top_k = config.get("num_local_experts") or config["num_experts"], config["num_experts_per_tok"]
    if not layers:
        return None
    if not 1 <= top_k <= count:
        raise ModelError(f"num_experts_per_tok={top_k} is not between 1 and the {count} experts there are")
    return ExpertSpec(count, top_k, intermediate_size, normalise, layers)
