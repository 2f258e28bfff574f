"""Options of vLLM that stand in people's command lines and scripts and have nothing to set here."""

import logging
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from enginecore.errors import ConfigError

logger = logging.getLogger(__name__)


class _Meaning(NamedTuple):
    accepted: tuple[Any, ...]
    reason: str


def _taken(reason: str, *accepted: Any) -> Any:
    return field(
        default=None, metadata={"help": f"no effect: {reason}", "meaning": _Meaning(accepted, reason)}
    )


@dataclass(frozen=True, kw_only=True)
class VLLMOptions:
    """Options that are taken without effect, each with a line in the log.

    Raises:
        ConfigError: one has a value that would have to have an effect.
    """

    enable_chunked_prefill: bool | None = _taken("long prompts always run in chunks", True)
    disable_log_stats: bool | None = _taken("log_level decides what is logged", True, False)
    disable_custom_all_reduce: bool | None = _taken("all_reduce is NCCL's", True, False)
    trust_remote_code: bool | None = _taken("no code that comes with a model is run", False)
    load_format: str | None = _taken("the files decide", "auto", "safetensors")
    tokenizer_mode: str | None = _taken("there is one kind of tokenizer", "auto", "hf")
    model_impl: str | None = _taken("there is one implementation of each family", "auto")
    runner: str | None = _taken("every model generates and embeds", "auto", "generate", "pooling")
    task: str | None = _taken("every model generates and embeds", "auto", "generate", "embed")
    convert: str | None = _taken("every model generates and embeds", "auto", "none", "embed")
    skip_tokenizer_init: bool | None = _taken("the tokenizer is loaded where there is one", False)
    enable_lora: bool | None = _taken("there are no adapters", False)
    enable_auto_tool_choice: bool | None = _taken("tool_call_parser turns tool calls on", True)
    cpu_offload_gb: float | None = _taken("weights stay on the device", 0.0)

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is None:
                continue
            meaning: _Meaning = entry.metadata["meaning"]
            if value not in meaning.accepted:
                right = " or ".join(map(_as_written, meaning.accepted))
                raise ConfigError(
                    f"{entry.name}={_as_written(value)} is not supported: {meaning.reason}; "
                    f"leave it out, or give {right}"
                )
            logger.warning("%s=%s has no effect: %s", entry.name, _as_written(value), meaning.reason)


def _as_written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
