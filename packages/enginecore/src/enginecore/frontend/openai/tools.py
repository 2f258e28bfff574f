"""Validation of a chat's tools, and of what it says about calling them."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from enginecore.errors import RequestError
from enginecore.frontend.openai.bodies import ChatBody

NO_PARSER = (
    'tools with tool_choice "auto" need a parser of the model\'s tool calls: start with tool_call_parser '
    '(hermes, for example), or send tool_choice "none"'
)


def with_chosen_tools(body: ChatBody) -> ChatBody:
    """Return `body` once `tools` and `tool_choice` are checked: of allowed tools, with these and their mode.

    A model that may call some of its tools is shown no others.

    Raises:
        RequestError: with the field at fault as its `param`.
    """
    names = check_tool_list(body.tools or [])
    choice = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        mode, allowed = _allowed(choice, names)
        tools = [tool for tool, name in zip(body.tools or [], names, strict=True) if name in allowed]
        return msgspec.structs.replace(body, tools=tools, tool_choice=mode)
    _check_choice(choice, names)
    return body


def _check_choice(choice: str | dict[str, Any] | None, names: Sequence[str]) -> None:
    if choice is None or choice in ("none", "auto"):
        return
    if choice != "required" and not isinstance(choice, dict):
        raise RequestError(
            f'tool_choice must be "none", "auto", "required" or a tool, got {choice!r:.80}', "tool_choice"
        )
    if not names:
        raise RequestError("tool_choice asks for a call, and there are no tools", "tool_choice")
    if isinstance(choice, dict):
        _check_known(_chosen_name(choice), names)


def _check_known(name: str, names: Sequence[str]) -> None:
    if name not in names:
        raise RequestError(
            f"tool_choice names {name!r:.80}, and the tools are {', '.join(names)}", "tool_choice"
        )


def _allowed(choice: Mapping[str, Any], names: Sequence[str]) -> tuple[str, set[str]]:
    """Return the mode of allowed tools, and their names."""
    where = "tool_choice.allowed_tools"
    given = choice.get("allowed_tools")
    if not isinstance(given, Mapping):
        raise RequestError(f"{where} must be an object, got {given!r:.80}", "tool_choice")
    mode, tools = given.get("mode"), given.get("tools")
    if mode not in ("auto", "required"):
        raise RequestError(f'{where}.mode must be "auto" or "required", got {mode!r:.80}', "tool_choice")
    if not isinstance(tools, list) or not tools:
        raise RequestError(
            f"{where}.tools must be a list of tools, at least one, got {tools!r:.80}", "tool_choice"
        )
    if not names:
        raise RequestError("tool_choice allows tools, and there are no tools", "tool_choice")
    allowed = set()
    for place, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(f"{where}.tools[{place}] must be a tool, got {tool!r:.80}", "tool_choice")
        name = _tool_name(tool, f"{where}.tools[{place}]", "tool_choice")
        _check_known(name, names)
        allowed.add(name)
    return mode, allowed


def check_tool_list(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the tools' names. Raises RequestError as `with_chosen_tools` does."""
    return [_tool_name(tool, f"tools[{place}]") for place, tool in enumerate(tools)]


def _tool_name(tool: Mapping[str, Any], where: str, param: str = "tools") -> str:
    if tool.get("type", "function") != "function":
        raise RequestError(f"{where}.type must be function, got {tool['type']!r:.80}", param)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function is missing", param)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.function.name must be a text, got {name!r:.80}", param)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(
            f"{where}.function.parameters must be a JSON schema, got {parameters!r:.80}", param
        )
    return name


def _chosen_name(choice: Mapping[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type", "function") != "function" or not isinstance(name, str):
        raise RequestError(
            'tool_choice must be {"type": "function", "function": {"name": "…"}}, '
            f"got {dict(choice)!r:.200}",
            "tool_choice",
        )
    return name
