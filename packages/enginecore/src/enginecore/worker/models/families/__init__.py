"""From a config.json to a DecoderSpec, for each supported architecture."""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from enginecore.errors import ModelError
from enginecore.worker.models.families import gemma, gpt2, llama, moe, starcoder2
from enginecore.worker.models.spec import DecoderSpec

Family = Callable[[dict[str, Any]], DecoderSpec]
"""Returns the decoder that a config.json describes; a KeyError names a setting that the file lacks."""

ENTRY_POINTS = "octavo.models"
"""Group in which packages declare families: each entry point is an architecture's name and its `Family`."""

_FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": llama.llama,
    "MistralForCausalLM": llama.mistral,
    "Qwen2ForCausalLM": llama.qwen2,
    "Qwen3ForCausalLM": llama.qwen3,
    "Phi3ForCausalLM": llama.phi3,
    "GPT2LMHeadModel": gpt2.gpt2,
    "Starcoder2ForCausalLM": starcoder2.starcoder2,
    "GemmaForCausalLM": gemma.gemma,
    "Gemma2ForCausalLM": gemma.gemma2,
    "Gemma3ForCausalLM": gemma.gemma3,
    "MixtralForCausalLM": moe.mixtral,
    "Qwen3MoeForCausalLM": moe.qwen3_moe,
}


def register(architecture: str, family: Family) -> None:
    """Support `architecture`, a name in config.json's `architectures`, in this process.

    It replaces a family of that name. A package makes a family known to every process with an entry point of
    the group `octavo.models`; a module does when the option `plugins` names it.
    """
    if not callable(family):
        raise TypeError(f"a family is a function from config.json to DecoderSpec, got {family!r}")
    _FAMILIES[architecture] = family


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    """Return the decoder that `config` describes.

    Raises:
        ModelError: the architecture or one of its settings is not supported.
    """
    architectures = config.get("architectures") or []
    for name in architectures:
        family = _FAMILIES.get(name) or _installed(name)
        if family is not None:
            try:
                return family(config)
            except KeyError as error:
                raise ModelError(f"config.json lacks {error.args[0]}") from None
    named = ", ".join(architectures) or config.get("model_type") or "none named"
    known = [*_FAMILIES, *entry_points(group=ENTRY_POINTS).names]
    raise ModelError(f"architecture {named} is not supported (supported: {', '.join(known)})")


def _installed(architecture: str) -> Family | None:
    """Return the family that an installed package declares for `architecture`; None where none does.

    Raises:
        ModelError: it cannot be imported.
    """
    for entry in entry_points(group=ENTRY_POINTS, name=architecture):
        try:
            return entry.load()
        except Exception as error:  # whatever a package of somebody else raises
            said = f"{type(error).__name__}: {error}"
            raise ModelError(f"the family of {architecture}, {entry.value}, is broken: {said}") from error
    return None
