"""Bodies of OpenAI's Responses API, as fields of a chat's body.

Reference: https://platform.openai.com/docs/api-reference/responses/create
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from enginecore.errors import RequestError
from enginecore.frontend.openai import Integer
from octavo_serve.formats.values import EFFORTS, one_of

Item = dict[str, Any]
"""Of a conversation: a message, a function call, its output, or reasoning."""

_INCLUDABLE = (
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""Parts of a response that are optional. Reasoning is shown as it is, so that no client needs its encrypted
form; of images and tools other than functions there is nothing to include."""
_SUMMARIES = ("auto", "concise", "detailed")
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")


class ResponsesBody(msgspec.Struct):
    """The fields that are looked at; others have no effect here."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Integer | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    reasoning: dict[str, Any] | None = None
    conversation: Any = None
    prompt: Any = None


def check(body: ResponsesBody) -> None:
    """Raise RequestError for what is not here, and for values that are none."""
    if body.background:
        raise RequestError("background is not supported: the request waits for its response", "background")
    unknown = next((name for name in body.include or () if name not in _INCLUDABLE), None)
    if unknown is not None:
        raise RequestError(f"include: there is no {unknown!r:.80}, only {', '.join(_INCLUDABLE)}", "include")
    _check_text(body.text or {})
    for name in ("conversation", "prompt"):
        if getattr(body, name) is not None:
            raise RequestError(f"{name} is not supported: nothing of the kind is kept here", name)
    if body.truncation not in (None, "disabled"):
        raise RequestError(f"truncation must be disabled, got {body.truncation!r:.80}", "truncation")
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise RequestError(
            f"max_output_tokens must be at least 1, got {body.max_output_tokens}", "max_output_tokens"
        )


def _check_text(text: Mapping[str, Any]) -> None:
    unknown = next((name for name in text if name not in ("format", "verbosity")), None)
    if unknown is not None:
        raise RequestError(f"text has no field {unknown!r:.80}, only format and verbosity", "text")
    # Verbosity is what a model was trained to: to no other would it say anything.
    one_of(text, "verbosity", "text", ("medium",), ("low", "high"))


def input_items(body: ResponsesBody) -> list[Item]:
    """Return the items that `body` adds to a conversation.

    Raises:
        RequestError: there are none.
    """
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": body.input}]
    if not body.input:
        raise RequestError("input is empty: it must hold at least one item", "input")
    return body.input


def chat_fields(body: ResponsesBody, items: Sequence[Item]) -> dict[str, Any]:
    """Return the fields of the chat that goes on after `items`, all of the conversation.

    Raises:
        RequestError: an item or tool has a form that is not known, or wants what is not here.
    """
    messages: list[Item] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    before = len(items) - len(input_items(body))  # of earlier responses, which have been looked at
    for place, item in enumerate(items):
        _add_item(messages, item, f"input[{place - before}]")
    fields: dict[str, Any] = {
        "messages": messages,
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
        "parallel_tool_calls": body.parallel_tool_calls,
    }
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    fields |= _reasoning(body.reasoning or {})
    if body.tools:
        fields["tools"] = [_tool(tool, place) for place, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(body.tool_choice)
    shape = (body.text or {}).get("format")
    if shape is not None:
        fields["response_format"] = _response_format(shape)
    return fields


def _reasoning(reasoning: Mapping[str, Any]) -> dict[str, Any]:
    """Return what templates know about thinking: whether the model does, and how much.

    A summary may be asked for: reasoning is shown as it is. Of earlier turns models are shown none.
    """
    for name in ("summary", "generate_summary"):
        one_of(reasoning, name, "reasoning", _SUMMARIES)
    one_of(reasoning, "context", "reasoning", ("auto", "current_turn"), ("all_turns",))
    one_of(reasoning, "mode", "reasoning", ("standard",), ("pro",))
    effort = one_of(reasoning, "effort", "reasoning", ("none", "minimal", *EFFORTS))
    if effort is None:
        return {}
    variables = {"enable_thinking": effort != "none", "reasoning_effort": effort}
    return {"chat_template_kwargs": variables}


def _add_item(messages: list[Item], item: Item, where: str) -> None:
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise RequestError(f"{where}.role must be one of {', '.join(_ROLES)}, got {role!r:.80}", "input")
        messages.append({"role": role, "content": _content(item.get("content"), where)})
    elif kind == "function_call":
        function = {"name": _text(item, "name", where), "arguments": item.get("arguments") or ""}
        call = {"id": _text(item, "call_id", where), "type": "function", "function": function}
        if messages and messages[-1].get("role") == "assistant":
            # One turn of the model may hold a text and several calls.
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif kind == "function_call_output":
        content = _content(item.get("output"), where)
        messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": content})
    elif kind != "reasoning":
        known = "message, function_call, function_call_output or reasoning"
        raise RequestError(f"{where}.type must be {known}, got {kind!r:.80}", "input")


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise RequestError(f"{where} needs a text or a list of parts", "input")
    for part in content:
        if part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            kind = part.get("type")
            raise RequestError(
                f"{where}: a part of type {kind!r:.80} is not supported: only text is", "input"
            )
    return "".join(part["text"] for part in content)


def _text(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise RequestError(f"{where}.{name} is missing", "input")
    return value


def _tool(tool: dict[str, Any], place: int) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise RequestError(f"tools[{place}].type {kind!r:.80} is not supported: only function is", "tools")
    named = ("name", "description", "parameters", "strict")
    return {
        "type": "function",
        "function": {name: tool[name] for name in named if tool.get(name) is not None},
    }


def _tool_choice(choice: str | dict[str, Any]) -> Any:
    if isinstance(choice, str):
        return choice
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        if isinstance(tools, list):
            tools = [
                {"type": tool.get("type"), "function": {"name": tool.get("name")}}
                if isinstance(tool, dict)
                else tool
                for tool in tools
            ]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    if choice.get("type") != "function":
        kind = choice.get("type")
        raise RequestError(
            f"tool_choice.type must be function or allowed_tools, got {kind!r:.80}", "tool_choice"
        )
    name = choice.get("name")
    if not isinstance(name, str):
        raise RequestError(f"tool_choice.name must be a text, got {name!r:.80}", "tool_choice")
    return {"type": "function", "function": {"name": name}}


def _response_format(shape: Any) -> dict[str, Any]:
    if not isinstance(shape, dict):
        raise RequestError(f"text.format must be an object, got {shape!r:.80}", "text.format")
    if shape.get("type") != "json_schema":
        return shape
    inner = {name: shape[name] for name in ("name", "schema", "strict", "description") if name in shape}
    return {"type": "json_schema", "json_schema": inner}
