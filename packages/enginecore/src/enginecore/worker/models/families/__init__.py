"""From a config.json to a DecoderSpec, for each supported architecture."""

from collections.abc import Callable
from typing import Any

from enginecore.errors import ModelError
from enginecore.worker.models.families import gemma, gpt2, llama, moe
from enginecore.worker.models.spec import DecoderSpec

_FAMILIES: dict[str, Callable[[dict[str, Any]], DecoderSpec]] = {
    "LlamaForCausalLM": llama.llama,
    "MistralForCausalLM": llama.mistral,
    "Qwen2ForCausalLM": llama.qwen2,
    "Qwen3ForCausalLM": llama.qwen3,
    "Phi3ForCausalLM": llama.phi3,
    "GPT2LMHeadModel": gpt2.gpt2,
    "GemmaForCausalLM": gemma.gemma,
    "Gemma2ForCausalLM": gemma.gemma2,
    "Gemma3ForCausalLM": gemma.gemma3,
    "MixtralForCausalLM": moe.mixtral,
    "Qwen3MoeForCausalLM": moe.qwen3_moe,
}


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    """Return the decoder that `config` describes.

    Raises:
        ModelError: the architecture or one of its settings is not supported.
    """
    architectures = config.get("architectures") or []
    for name in architectures:
        if name in _FAMILIES:
            try:
                return _FAMILIES[name](config)
            except KeyError as error:
                raise ModelError(f"config.json lacks {error.args[0]}") from None
    named = ", ".join(architectures) or config.get("model_type") or "none named"
    raise ModelError(f"architecture {named} is not supported (supported: {', '.join(_FAMILIES)})")
