"""Validation of a chat's tools, and of what it says about calling them."""

from collections.abc import Mapping, Sequence
from typing import Any

from enginecore.errors import RequestError
from enginecore.frontend.openai.bodies import ChatBody

NO_PARSER = (
    'tools with tool_choice "auto" need a parser of the model\'s tool calls: start with tool_call_parser '
    '(hermes, for example), or send tool_choice "none"'
)


def check_tools(body: ChatBody) -> None:
    """Check the form of `tools`, and that `tool_choice` is one of them or a word for them.

    Raises:
        RequestError: with the field at fault as its `param`.
    """
    names = check_tool_list(body.tools or [])
    choice = body.tool_choice
    if choice is None or choice in ("none", "auto"):
        return
    if choice != "required" and not isinstance(choice, dict):
        raise RequestError(
            f'tool_choice must be "none", "auto", "required" or a tool, got {choice!r:.80}', "tool_choice"
        )
    if not names:
        raise RequestError("tool_choice asks for a call, and there are no tools", "tool_choice")
    if isinstance(choice, dict):
        name = _chosen_name(choice)
        if name not in names:
            raise RequestError(
                f"tool_choice names {name!r:.80}, and the tools are {', '.join(names)}", "tool_choice"
            )


def check_tool_list(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the tools' names. Raises RequestError as `check_tools` does."""
    return [_tool_name(tool, f"tools[{place}]") for place, tool in enumerate(tools)]


def _tool_name(tool: Mapping[str, Any], where: str) -> str:
    if tool.get("type", "function") != "function":
        raise RequestError(f"{where}.type must be function, got {tool['type']!r:.80}", "tools")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function is missing", "tools")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.function.name must be a text, got {name!r:.80}", "tools")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(
            f"{where}.function.parameters must be a JSON schema, got {parameters!r:.80}", "tools"
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
