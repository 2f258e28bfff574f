"""Bodies of Anthropic's Messages API, as fields of a chat's body.

Reference: https://docs.anthropic.com/en/api/messages
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from enginecore.errors import RequestError
from enginecore.frontend.openai import Integer
from octavo_serve.formats.values import EFFORTS, one_of

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_PASSED_OVER = ("thinking", "redacted_thinking")
"""Blocks of an assistant's turn that say what it thought before; templates want none of it back."""


class MessagesBody(msgspec.Struct):
    """The fields that are looked at; others, such as `metadata`, have no effect here."""

    messages: list[dict[str, Any]]
    max_tokens: Integer
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class CountBody(msgspec.Struct):
    """A body of /v1/messages/count_tokens."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


def chat_fields(body: MessagesBody | CountBody) -> dict[str, Any]:
    """Return the fields of the chat that `body` asks for.

    Raises:
        RequestError: a message or tool has a form that is not known, or wants what is not here.
    """
    fields: dict[str, Any] = {"messages": _system(body.system) + _messages(body.messages)}
    if body.tools:
        fields["tools"] = [_tool(tool, place) for place, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields |= _tool_choice(body.tool_choice)
    if body.thinking is not None:
        fields |= _thinking(body.thinking)
    if body.output_config is not None:
        fields |= _output(body.output_config, fields.get("chat_template_kwargs", {}))
    if isinstance(body, MessagesBody):
        if body.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, got {body.max_tokens}", "max_tokens")
        fields |= {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
        }
    if fields["messages"][-1]["role"] == "assistant":
        # The answer goes on where the model's last turn ends.
        fields["continue_final_message"] = True
    return fields


def _thinking(thinking: Mapping[str, Any]) -> dict[str, Any]:
    """Return what templates know about thinking: whether the model does.

    A budget is taken, as clients must send one, and no model is held to it: `max_tokens` counts thinking too.
    """
    kinds = ("enabled", "disabled", "adaptive")
    kind = one_of(thinking, "type", "thinking", kinds, ("between_tools",))
    if kind is None:
        raise RequestError(f"thinking.type must be one of {', '.join(kinds)}, got None", "thinking.type")
    budget = thinking.get("budget_tokens")
    if budget is not None and (type(budget) is not int or budget < 1):
        raise RequestError(
            f"thinking.budget_tokens must be an integer of at least 1, got {budget!r:.80}",
            "thinking.budget_tokens",
        )
    display = one_of(thinking, "display", "thinking", ("summarized", "omitted"))
    return {
        "chat_template_kwargs": {"enable_thinking": kind != "disabled"},
        "include_reasoning": display != "omitted",
    }


def _output(config: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return how much to think, added to the template's `variables`, and the form of the answer."""
    effort = one_of(config, "effort", "output_config", EFFORTS)
    fields: dict[str, Any] = {}
    if effort is not None:
        fields["chat_template_kwargs"] = {**variables, "reasoning_effort": effort}
    shape = config.get("format")
    if shape is None:
        return fields
    if not isinstance(shape, dict) or shape.get("type") != "json_schema":
        raise RequestError("output_config.format.type must be json_schema", "output_config")
    inner = {"name": "output", "schema": shape.get("schema")}
    return {**fields, "response_format": {"type": "json_schema", "json_schema": inner}}


def _system(system: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if not system:
        return []
    text = system if isinstance(system, str) else _text_of(system, "system")
    return [{"role": "system", "content": text}] if text else []


def _messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not messages:
        raise RequestError("messages is empty: it must hold at least one message", "messages")
    return [
        made for place, message in enumerate(messages) for made in _message(message, f"messages[{place}]")
    ]


def _message(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the chat's messages for one: a user's turn may hold results of tools, which are their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise RequestError(f"{where}.role must be user or assistant, got {role!r:.80}", "messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise RequestError(f"{where}.content must be a text or a list of blocks", "messages")
    return _assistant(content, where) if role == "assistant" else _user(content, where)


def _user(blocks: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    texts: list[str] = []
    for place, block in enumerate(blocks):
        here = f"{where}.content[{place}]"
        if block.get("type") == "tool_result":
            content = block.get("content") or ""
            text = content if isinstance(content, str) else _text_of(content, f"{here}.content")
            call = _named(block, "tool_use_id", here)
            found.append({"role": "tool", "tool_call_id": call, "content": text})
        else:
            texts.append(_text(block, here))
    # Results belong right after the call; what the user says beside them comes after.
    return [*found, {"role": "user", "content": "\n".join(texts)}] if texts or not found else found


def _assistant(blocks: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    texts, calls = [], []
    for place, block in enumerate(blocks):
        here = f"{where}.content[{place}]"
        if block.get("type") == "tool_use":
            given = block.get("input", {})
            if not isinstance(given, dict):
                raise RequestError(f"{here}.input must be an object, got {given!r:.80}", "messages")
            arguments = msgspec.json.encode(given).decode()
            function = {"name": _named(block, "name", here), "arguments": arguments}
            calls.append({"id": _named(block, "id", here), "type": "function", "function": function})
        elif block.get("type") not in _PASSED_OVER:
            texts.append(_text(block, here))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    return [message | {"tool_calls": calls} if calls else message]


def _text_of(blocks: Any, where: str) -> str:
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise RequestError(f"{where} must be a text or a list of blocks", where.partition("[")[0])
    return "\n".join(_text(block, f"{where}[{place}]") for place, block in enumerate(blocks))


def _text(block: Mapping[str, Any], where: str) -> str:
    field = where.partition("[")[0]
    if block.get("type") != "text":
        raise RequestError(f"{where}.type {block.get('type')!r:.80} is not supported: only text is", field)
    if not isinstance(block.get("text"), str):
        raise RequestError(f"{where}.text must be a text", field)
    return block["text"]


def _named(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str) or not value:
        raise RequestError(f"{where}.{name} is missing", "messages")
    return value


def _tool(tool: dict[str, Any], place: int) -> dict[str, Any]:
    kind, name, schema = tool.get("type"), tool.get("name"), tool.get("input_schema")
    if kind not in (None, "custom"):
        raise RequestError(f"tools[{place}].type {kind!r:.80} is not supported: only custom is", "tools")
    if not isinstance(name, str) or not isinstance(schema, dict):
        raise RequestError(f"tools[{place}] needs a name and an input_schema", "tools")
    function = {"name": name, "description": tool.get("description") or "", "parameters": schema}
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    fields: dict[str, Any] = {}
    if kind == "tool":
        name = choice.get("name")
        if not isinstance(name, str):
            raise RequestError(f"tool_choice.name must be a text, got {name!r:.80}", "tool_choice")
        fields["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif kind in _CHOICES:
        fields["tool_choice"] = _CHOICES[kind]
    else:
        raise RequestError(
            f"tool_choice.type must be auto, any, tool or none, got {kind!r:.80}", "tool_choice"
        )
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    return fields
