"""JSON Schemas of the calls that tool_choice forces: vLLM's, a list of calls or one tool's arguments."""

from collections.abc import Mapping
from typing import Any

from enginecore.errors import RequestError
from enginecore.frontend.openai.bodies import ChatBody

_DEFINITIONS = ("$defs", "definitions")
"""What `$ref` points to, from the root of a schema."""


def calls_schema(body: ChatBody) -> dict[str, Any] | None:
    """Return the schema that the answer must follow; None where no call is forced.

    Raises:
        RequestError: two tools have different definitions under one name.
    """
    if not body.forces_call:
        return None
    functions = [tool["function"] for tool in body.tools or []]
    name = body.forced_tool
    if name is not None:
        return _parameters(next(function for function in functions if function["name"] == name))
    shared: dict[str, dict[str, Any]] = {}
    items = [_call(function, shared) for function in functions]
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": items}, **shared}
    return {**schema, "maxItems": 1} if body.parallel_tool_calls is False else schema


def _call(function: Mapping[str, Any], shared: dict[str, dict[str, Any]]) -> dict[str, Any]:
    parameters = _parameters(function)
    for kind in _DEFINITIONS:
        for name, definition in parameters.pop(kind, {}).items():
            if shared.setdefault(kind, {}).setdefault(name, definition) != definition:
                raise RequestError(
                    f'tools with tool_choice "required" have one name for two things: {kind}/{name}', "tools"
                )
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [function["name"]]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", **(function.get("parameters") or {"properties": {}})}
