"""Options of a run and of its sampling; the engine's are in `EngineConfig`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from enginecore import RequestOutputKind, SamplingParams
from enginecore.errors import ConfigError

DEFAULT_MAX_TOKENS = 128
DEFAULT_CHAT_TOKENS = 1024


def _option(default: Any, text: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Options of a run: prompts, a conversation, or a file of requests."""

    prompt: tuple[str, ...] = _option(
        (), "a prompt to continue, or - for stdin; may be repeated", repeat=True
    )
    chat: bool = _option(False, "each prompt is a user's message to answer; without --prompt a conversation")
    system: str | None = _option(None, "system message of a chat")
    input: str | None = _option(None, "file of requests in OpenAI's batch format (JSON lines); - for stdin")
    output: str | None = _option(None, "file for the answers to --input; default: stdout, also as -")
    resume: bool = _option(False, "keep the answers that --output holds, and answer what is left")
    overwrite: bool = _option(False, "replace the answers that --output holds")
    strict: bool = _option(False, "exit with status 1 if a request of --input failed")
    served_model_name: tuple[str, ...] = _option(
        (), "names by which requests of --input may call the model; default: MODEL as given"
    )


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Sampling of the prompts of --prompt; requests of --input bring their own parameters.

    Raises ConfigError when a value is out of range.
    """

    max_tokens: int | None = _option(
        None, f"most tokens of an answer; default: {DEFAULT_MAX_TOKENS}, in a chat {DEFAULT_CHAT_TOKENS}"
    )
    min_tokens: int = _option(0, "fewest tokens of an answer")
    n: int = _option(1, "answers to each prompt")
    temperature: float | None = _option(
        None, "randomness; 0 always takes the likeliest token; default: what the model recommends"
    )
    top_p: float | None = _option(
        None, "choose among the likeliest tokens that together have this probability; default as above"
    )
    top_k: int | None = _option(None, "choose among this many likeliest tokens; 0: all; default as above")
    min_p: float | None = _option(
        None, "leave out tokens less likely than this share of the likeliest; default as above"
    )
    presence_penalty: float = _option(0.0, "lower the logits of tokens in the answer so far")
    frequency_penalty: float = _option(0.0, "the same, for each time they occur")
    repetition_penalty: float | None = _option(
        None, "divide the logits of tokens in prompt and answer; default as above"
    )
    stop: tuple[str, ...] = _option((), "text that ends an answer; may be given again", repeat=True)
    ignore_eos: bool = _option(False, "go on after an end-of-sequence token")

    def __post_init__(self) -> None:
        self.params(self.max_tokens, {})

    def params(self, max_tokens: int | None, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters with that many tokens at most; `defaults` are the model's own."""
        given = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        values = {**defaults, **{name: value for name, value in given.items() if value is not None}}
        values |= {"max_tokens": max_tokens, "stop": list(self.stop)}
        try:
            return SamplingParams(**values, output_kind=RequestOutputKind.DELTA)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def given(self) -> list[str]:
        """Return the names of what differs from the defaults."""
        return [entry.name for entry in fields(self) if getattr(self, entry.name) != entry.default]


def check_run(run: RunConfig, sampling: SamplingConfig) -> None:
    """Raise ConfigError when there is nothing to run, or an option that would have no effect."""
    if not (run.prompt or run.chat or run.input is not None):
        raise ConfigError("give a prompt (--prompt TEXT), a conversation (--chat) or a batch (--input FILE)")
    if run.prompt and run.input is not None:
        raise ConfigError("give either prompts (--prompt TEXT) or a batch (--input FILE)")
    if run.input is not None and sampling.given():
        raise ConfigError(f"{sampling.given()[0]} is for --prompt; requests of --input bring their own")
    if run.prompt.count("-") > 1:
        raise ConfigError("--prompt - is given twice: standard input can be read once")
    if run.chat and not run.prompt and sampling.n > 1:
        raise ConfigError("n is for --prompt: a conversation goes on from one answer")
    has_file = run.output not in (None, "-")
    needs = [
        ("chat", run.chat, run.input is None, "--prompt, or neither --prompt nor --input"),
        ("system", run.system is not None, run.chat, "--chat"),
        ("output", run.output is not None, run.input is not None, "--input"),
        ("served_model_name", bool(run.served_model_name), run.input is not None, "--input"),
        ("strict", run.strict, run.input is not None, "--input"),
        ("resume", run.resume, has_file, "--output FILE"),
        ("overwrite", run.overwrite, has_file, "--output FILE"),
    ]
    for name, is_given, has_effect, needed in needs:
        if is_given and not has_effect:
            raise ConfigError(f"{name} needs {needed}")
    if run.resume and run.overwrite:
        raise ConfigError("give either --resume or --overwrite")
