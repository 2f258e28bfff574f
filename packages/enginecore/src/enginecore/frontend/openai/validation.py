"""Validation of bodies, and the fields that this version refuses by name."""

from collections.abc import Mapping, Sequence
from typing import Any

from enginecore.errors import RequestError
from enginecore.frontend.openai.bodies import Body, ChatBody, CompletionBody, convert
from enginecore.frontend.openai.tools import with_chosen_tools
from enginecore.frontend.text.tool_messages import check_calls

MAX_N = 128
"""Most samples of one prompt, as in OpenAI's API."""

_REFUSED: dict[str, tuple[Any, ...]] = {
    "logits_processors": ([],),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "grammar": (),
    "json_schema": (),
    "n_predict": (),
    "repeat_penalty": (1,),
}
"""Fields that are refused by both routes, unless they are null or have one of these values."""

_REFUSED_COMPLETION: dict[str, tuple[Any, ...]] = {"suffix": ("",)}

_REFUSED_CHAT: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": ([], ["text"]),
    "audio": (),
    "echo": (False,),
    "chat_template": (),
}

_REFUSED_BEAMS: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "echo": (False,),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "stop": ([], ""),
    "stop_token_ids": ([],),
    "min_tokens": (0,),
    "seed": (),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "vllm_xargs": ({},),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "tool_choice": ("none", "auto"),
}
"""Fields that beam search has no use for."""

_REASONS = {
    "logits_processors": "a request may not bring logits_processors: the server's option of that name "
    "registers them, and vllm_xargs holds their arguments",
    "prompt_embeds": "prompt_embeds is not supported: give text or token ids",
    "grammar": "grammar is llama.cpp's: send structured_outputs with a grammar",
    "json_schema": "json_schema is llama.cpp's: send response_format, or structured_outputs with json",
    "n_predict": "n_predict is llama.cpp's: send max_tokens",
    "repeat_penalty": "repeat_penalty is llama.cpp's: send repetition_penalty",
    "functions": "functions is not supported: it was replaced by tools",
    "function_call": "function_call is not supported: it was replaced by tool_choice",
    "chat_template": "a request may not bring its own chat_template",
}
"""What is said of a refused field where "not supported" would not do."""

ROLES = ("system", "developer", "user", "assistant", "tool")


class ModelNotFound(RequestError):
    """A request names a model that is not the one here."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "model", "model_not_found")


def model_name(fields: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the name that the answer to a body carries: the one it names, or the first of `names`.

    It is looked at before any other field, so a wrong model is told as such whatever else is wrong.

    Raises:
        ModelNotFound: the body names none of `names`.
    """
    requested = fields.get("model")
    if requested is None:
        return names[0]
    if not isinstance(requested, str):
        raise RequestError(f"model must be a text, got {requested!r:.80}", "model")
    if requested not in names:
        raise ModelNotFound(f"there is no model {requested!r:.200} here, only {', '.join(names)}")
    return requested


def read_completion(fields: Mapping[str, Any], max_logprobs: int) -> CompletionBody:
    """Return a checked completions body; at most `max_logprobs` logprobs a token (-1: no limit).

    Raises:
        RequestError: with the field at fault as its `param`.
    """
    body = convert(fields, CompletionBody)
    _refuse(fields, _REFUSED_COMPLETION)
    _check_shared(fields, body, max_logprobs)
    if body.best_of is not None and body.best_of != body.samples:
        raise RequestError(
            f"best_of must equal n={body.samples} (choosing among more samples is not supported),"
            f" got {body.best_of}",
            "best_of",
        )
    _check_logprobs("logprobs", body.logprobs, max_logprobs)
    return body


def read_chat(fields: Mapping[str, Any], max_logprobs: int) -> ChatBody:
    """Return a checked chat body; at most `max_logprobs` logprobs a token (-1: no limit).

    Raises:
        RequestError: with the field at fault as its `param`.
    """
    body = convert(fields, ChatBody)
    _refuse(fields, _REFUSED_CHAT)
    _check_shared(fields, body, max_logprobs)
    check_template_kwargs(body.chat_template_kwargs)
    for name in ("top_logprobs", "logprob_token_ids"):
        if getattr(body, name) and not body.logprobs:
            raise RequestError(f"{name} needs logprobs: true", name)
    _check_logprobs("top_logprobs", body.top_logprobs, max_logprobs)
    check_messages(body.messages)
    return with_chosen_tools(body)


def _check_logprobs(name: str, value: int | None, limit: int) -> None:
    if value is None:
        return
    if value < (0 if limit >= 0 else -1) or (limit >= 0 and value > limit):
        allowed = f"between 0 and {limit}" if limit >= 0 else "at least -1, the whole vocabulary"
        raise RequestError(f"{name} must be {allowed}, got {value}", name)


def _check_shared(fields: Mapping[str, Any], body: Body, max_logprobs: int) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs is not available with stream: true", "prompt_logprobs")
    _check_logprobs("prompt_logprobs", body.prompt_logprobs, max_logprobs)
    if not 1 <= body.samples <= MAX_N:
        raise RequestError(f"n must be between 1 and {MAX_N}, got {body.n}", "n")
    if body.cache_salt == "":
        raise RequestError("cache_salt must not be empty", "cache_salt")
    _refuse(fields, _REFUSED)
    if body.use_beam_search:
        # To completions a 0 is a number of logprobs, to chats false is none.
        asks = [] if fields.get("logprobs") is None or fields["logprobs"] is False else ["logprobs"]
        for name in asks + _harmful(fields, _REFUSED_BEAMS):
            raise RequestError(f"{name} is not available with use_beam_search: true", name)
    elif body.length_penalty not in (None, 1):
        raise RequestError("length_penalty needs use_beam_search: true", "length_penalty")


def _refuse(fields: Mapping[str, Any], refused: Mapping[str, tuple[Any, ...]]) -> None:
    for name in _harmful(fields, refused):
        raise RequestError(_REASONS.get(name, f"{name} is not supported by this version"), name)


def _harmful(fields: Mapping[str, Any], refused: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Return the fields of `refused` that have another value than null and those that are listed."""
    return [
        name
        for name, harmless in refused.items()
        if fields.get(name) is not None and fields[name] not in harmless
    ]


def check_template_kwargs(given: dict[str, Any] | None) -> None:
    """Raise RequestError when template variables of a request name what it may not set through them."""
    for name in ("chat_template", "tools", "cache_salt"):
        if name in (given or {}):
            raise RequestError(f"chat_template_kwargs may not name {name}", "chat_template_kwargs")


def check_messages(messages: list[dict[str, Any]]) -> None:
    """Check what the chat template leaves open: which roles there are, and that each says something.

    Raises:
        RequestError: there is no message, or one has an unknown role, or neither content nor a tool call.
    """
    if not messages:
        raise RequestError("messages is empty: give at least one message", "messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = message.get("role")
        if role not in ROLES:
            roles = ", ".join(ROLES)
            raise RequestError(f"{where}.role must be one of {roles}, got {role!r:.80}", "messages")
        if message.get("function_call"):
            raise RequestError(
                f"{where}.function_call is not supported: it was replaced by tool_calls", "messages"
            )
        calls = message.get("tool_calls")
        if calls and role != "assistant":
            raise RequestError(f"{where}.tool_calls: only an assistant calls tools", "messages")
        if calls:
            check_calls(calls, where)
        if message.get("content") is None and not calls:
            raise RequestError(f"{where}.content is missing", "messages")
