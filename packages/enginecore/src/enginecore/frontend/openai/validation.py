"""Read bodies and refuse, by name, what this version cannot do.

A field passes when its value asks for nothing, as `tools: []` and `response_format: {"type": "text"}` do.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from enginecore.errors import RequestError
from enginecore.frontend.openai.bodies import Body, ChatBody, CompletionBody, decode, named_model

MAX_N = 128
"""Most samples of one prompt, as in OpenAI's API."""

ROLES = ("system", "developer", "user", "assistant")


class ModelNotFound(RequestError):
    """A request names a model that is not the one here."""


def model_name(raw: bytes | msgspec.Raw, names: Sequence[str]) -> str:
    """Return the name that the answer to a body carries: the one it names, or the first of `names`.

    It is looked at before any other field, so a wrong model is told as such whatever else is wrong.

    Raises:
        ModelNotFound: the body names none of `names`.
        RequestError: the body is no JSON object.
    """
    requested = named_model(raw)
    if requested is None:
        return names[0]
    if not isinstance(requested, str):
        raise RequestError(f"model must be a text, got {requested!r:.80}", "model")
    if requested not in names:
        raise ModelNotFound(f"there is no model {requested!r:.200} here, only {', '.join(names)}", "model")
    return requested


def read_completion(raw: bytes | msgspec.Raw, max_logprobs: int) -> CompletionBody:
    """Return a checked completions body; at most `max_logprobs` logprobs a token (-1: no limit).

    Raises:
        RequestError: with the field at fault as its `param`.
    """
    body = decode(raw, CompletionBody)
    _check_shared(body, max_logprobs)
    _refuse("suffix", body.suffix, "")
    _refuse("prompt_embeds", body.prompt_embeds)
    if body.best_of is not None and body.best_of != body.samples:
        raise RequestError(
            f"best_of must equal n={body.samples} (choosing among more samples is not supported),"
            f" got {body.best_of}",
            "best_of",
        )
    _check_logprobs("logprobs", body.logprobs, max_logprobs)
    return body


def read_chat(raw: bytes | msgspec.Raw, max_logprobs: int) -> ChatBody:
    """Return a checked chat body; at most `max_logprobs` logprobs a token (-1: no limit).

    Raises:
        RequestError: with the field at fault as its `param`.
    """
    body = decode(raw, ChatBody)
    _check_shared(body, max_logprobs)
    _refuse_tools(body)
    _refuse("functions", body.functions, [])
    _refuse("function_call", body.function_call, "none", "auto")
    _refuse("modalities", body.modalities, [], ["text"])
    _refuse("audio", body.audio)
    _refuse("echo", body.echo, False)
    if body.chat_template is not None:
        raise RequestError("a request may not bring its own chat_template", "chat_template")
    if body.add_special_tokens not in (None, False):
        raise RequestError(
            "add_special_tokens must be false: the chat template writes them", "add_special_tokens"
        )
    check_template_kwargs(body.chat_template_kwargs)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    _check_logprobs("top_logprobs", body.top_logprobs, max_logprobs)
    check_messages(body.messages)
    return body


def _check_logprobs(name: str, value: int | None, limit: int) -> None:
    if value is None:
        return
    if value < 0 or (limit >= 0 and value > limit):
        allowed = f"between 0 and {limit}" if limit >= 0 else "at least 0"
        raise RequestError(f"{name} must be {allowed}, got {value}", name)


def _check_shared(body: Body, max_logprobs: int) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs is not available with stream: true", "prompt_logprobs")
    _check_logprobs("prompt_logprobs", body.prompt_logprobs, max_logprobs)
    if body.samples > MAX_N:
        raise RequestError(f"n must be at most {MAX_N}, got {body.n}", "n")
    if body.cache_salt == "":
        raise RequestError("cache_salt must not be empty", "cache_salt")
    if body.response_format not in (None, {"type": "text"}):
        raise RequestError(
            'response_format: only {"type": "text"} is supported by this version', "response_format"
        )
    for name in ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        _refuse(name, getattr(body, name))
    _refuse("logits_processors", body.logits_processors, [])
    _refuse("use_beam_search", body.use_beam_search, False)
    _refuse("truncate_prompt_tokens", body.truncate_prompt_tokens)


def _refuse_tools(body: ChatBody) -> None:
    if body.tool_choice == "none":
        return
    if body.tools not in (None, []):
        raise RequestError(
            'tools are not supported by this version; tool_choice "none" asks for plain text', "tools"
        )
    if body.tool_choice not in (None, "auto"):
        raise RequestError("tool_choice needs tools, which this version does not support", "tool_choice")


def _refuse(name: str, value: Any, *harmless: Any) -> None:
    if value is not None and value not in harmless:
        raise RequestError(f"{name} is not supported by this version", name)


def check_template_kwargs(given: dict[str, Any] | None) -> None:
    """Raise RequestError when template variables of a request name what it may not set through them."""
    for name in ("chat_template", "tools"):
        if name in (given or {}):
            raise RequestError(f"chat_template_kwargs may not name {name}", "chat_template_kwargs")


def check_messages(messages: list[dict[str, Any]]) -> None:
    """Check what the chat template leaves open: which roles there are, and that nothing asks for tools.

    Raises:
        RequestError: there is no message, or one has an unknown role, no content or a tool call.
    """
    if not messages:
        raise RequestError("messages is empty: give at least one message", "messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = message.get("role")
        if role not in ROLES:
            roles = ", ".join(ROLES)
            raise RequestError(f"{where}.role must be one of {roles}, got {role!r:.80}", "messages")
        if message.get("tool_calls") or message.get("function_call"):
            raise RequestError(f"{where}: tool calls are not supported by this version", "messages")
        if message.get("content") is None:
            raise RequestError(f"{where}.content is missing", "messages")
