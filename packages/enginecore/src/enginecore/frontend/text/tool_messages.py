"""Tool calls of a conversation, in the form that chat templates take them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from enginecore.errors import RequestError

UNREADABLE = "arguments"
"""The key under which a template gets arguments that are no JSON object, such as those of a cut call."""


def plain_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return an assistant's calls with arguments as mappings, which templates walk; clients send their text.

    Arguments that are no JSON object become the only entry of one: the conversation goes on with what the
    model wrote.

    Args:
        calls: OpenAI's `tool_calls`.
        where: Names the message in errors.

    Raises:
        RequestError: a call has no name, or another type than function.
    """
    check_calls(calls, where)
    return [_plain_call(call) for call in calls]


def check_calls(calls: Any, where: str) -> None:
    """Raise RequestError as `plain_calls` does."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"{where}.tool_calls must be a list, got {calls!r:.80}", "messages")
    for place, call in enumerate(calls):
        here = f"{where}.tool_calls[{place}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise RequestError(f"{here}.function.name is missing", "messages")
        if call.get("type") not in (None, "function"):
            raise RequestError(f"{here}.type must be function, got {call['type']!r:.80}", "messages")


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = _mapping(function.get("arguments"))
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _mapping(arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        return {UNREADABLE: arguments}
    try:
        read = json.loads(arguments)
    except (ValueError, RecursionError):
        return {UNREADABLE: arguments}
    if read is None:
        return {}
    return read if isinstance(read, dict) else {UNREADABLE: read}
