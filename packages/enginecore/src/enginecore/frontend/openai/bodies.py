"""Bodies of /v1/completions and /v1/chat/completions: their fields and types.

A null counts as absent and an unknown field is ignored.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from enginecore.errors import RequestError

Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Every integer of a body fits the messages that carry it on."""


_SURROGATES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)
"""Escapes of JSON strings; the group is half of a surrogate pair that stands alone."""


class StreamOptions(msgspec.Struct):
    """Options of a stream: what it holds beside its deltas."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(msgspec.Struct, kw_only=True):
    """The fields that both routes share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Integer | None = None
    n: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    seed: Integer | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Integer] | None = None
    ignore_eos: bool | None = None
    min_tokens: Integer | None = None
    prompt_logprobs: Integer | None = None
    logprob_token_ids: list[Integer] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[Integer] | None = None
    bad_words: list[str] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    priority: Integer | None = None
    cache_salt: str | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def asked_tokens(self) -> int | None:
        """The length limit that the body names."""
        return self.max_tokens

    @property
    def samples(self) -> int:
        return 1 if self.n is None else self.n


class CompletionBody(Body, kw_only=True):
    """A body of /v1/completions."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: Integer | None = None
    add_special_tokens: bool | None = None
    best_of: Integer | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def prompt_alone(self) -> bool:
        """True when the answer is the prompt itself, with its logprobs and no new token."""
        return bool(self.echo) and self.max_tokens == 0


class ChatBody(Body, kw_only=True):
    """A body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None

    @property
    def may_call(self) -> bool:
        """Whether the answer may hold tool calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def forces_call(self) -> bool:
        """Whether the answer is to be tool calls and nothing else."""
        return self.may_call and self.tool_choice not in (None, "auto")

    @property
    def forced_tool(self) -> str | None:
        """The name of the one tool to call; None where none is named."""
        return self.tool_choice["function"]["name"] if isinstance(self.tool_choice, dict) else None

    @property
    def asked_tokens(self) -> int | None:
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer


AnyBody = TypeVar("AnyBody", bound=msgspec.Struct)


def decode(raw: bytes) -> dict[str, Any]:
    """Return the JSON object that `raw` holds.

    Raises:
        RequestError: `raw` is not valid JSON, or no object.
    """
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    except msgspec.ValidationError as error:
        field = _undecodable(raw)
        if field is None:
            raise RequestError(str(error)) from error
        reason = str(error).partition(" - at ")[0]
        raise RequestError(f"{field}: {reason}", field) from error
    except msgspec.DecodeError as error:
        _refuse_surrogates(raw)
        raise RequestError(f"the body is not valid JSON: {error}") from error


def convert(fields: Mapping[str, Any], kind: type[AnyBody]) -> AnyBody:
    """Return the object `fields` as a struct of type `kind`.

    Raises:
        RequestError: a field is missing or has the wrong type.
    """
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        where = path.rstrip("`") or _quoted_name(message)
        field = re.split(r"[.\[]", where)[0] if where else None
        raise RequestError(f"{where}: {message}" if path else message, field) from error


def _undecodable(raw: bytes) -> str | None:
    """Return the first field of a JSON object that holds a number no float or integer can."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return None  # no object
    for name, value in fields.items():
        try:
            msgspec.json.decode(value)
        except msgspec.ValidationError:
            return name
    return None


def _refuse_surrogates(raw: bytes) -> None:
    """Raise RequestError if half of a surrogate pair is all that keeps `raw` from being decoded.

    RFC 8259 (section 8.2) leaves open what such an escape means, and RFC 7493 forbids it. It comes from
    clients that cut a text between the halves of a character. Another character in its place would change
    the text unseen, so they are told.
    """
    found = next((match for match in _SURROGATES.finditer(raw) if match[1]), None)
    if found is None:
        return
    try:
        whole = [msgspec.json.decode(_repaired(raw, other), type=dict[str, Any]) for other in (b"d", b"c")]
    except (msgspec.DecodeError, RecursionError):
        return
    field = next((name for name, value in whole[0].items() if whole[1].get(name, value) != value), None)
    raise RequestError(
        f"{field or 'the body'}: {found[1].decode()} at byte {found.start()} is half of a surrogate pair, "
        "which is no character",
        field,
    )


def _repaired(raw: bytes, last: bytes) -> bytes:
    """Return `raw` with U+FFF and the digit `last` in the place of each half of a surrogate pair."""
    return _SURROGATES.sub(lambda match: b"\\ufff" + last if match[1] else match[0], raw)


def _quoted_name(message: str) -> str:
    found = re.fullmatch(r"Object missing required field `(\w+)`", message)
    return found[1] if found else ""
