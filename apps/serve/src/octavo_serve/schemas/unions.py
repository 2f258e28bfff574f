"""Components for the events of streams and the frames of WebSockets: unions, told apart by a discriminator.

Reference: https://spec.openapis.org/oas/v3.1.0#discriminator-object
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from enginecore.frontend.openai import ChatBody, CompletionBody
from octavo_serve.schemas.frames import (
    AuthFrame,
    CancelFrame,
    ChatChunkFrame,
    CompletionChunkFrame,
    DoneFrame,
    EngineFrame,
    ErrorFrame,
    WatchFrame,
)
from octavo_serve.schemas.message_events import MESSAGE_EVENTS
from octavo_serve.schemas.openai import ChatChunk, CompletionChunk, Error
from octavo_serve.schemas.response_events import RESPONSE_EVENTS

MEMBERS: tuple[type[msgspec.Struct], ...] = (
    *RESPONSE_EVENTS,
    *MESSAGE_EVENTS,
    CompletionChunk,
    ChatChunk,
    Error,
    CompletionBody,
    ChatBody,
    CancelFrame,
    WatchFrame,
    AuthFrame,
    CompletionChunkFrame,
    ChatChunkFrame,
    DoneFrame,
    ErrorFrame,
    EngineFrame,
)
"""Types that `UNIONS` refer to."""


def component(name: str) -> dict[str, str]:
    """Return a reference to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def _union(about: str, members: Iterable[str]) -> dict[str, Any]:
    return {"description": about, "anyOf": [component(name) for name in members]}


def _by(field: str, about: str, members: Mapping[str, str]) -> dict[str, Any]:
    """Return the union of the components named by each value of `field`."""
    mapping = {value: component(name)["$ref"] for value, name in members.items()}
    return {
        **_union(about, members.values()),
        "discriminator": {"propertyName": field, "mapping": mapping},
    }


def _tags(*kinds: type[msgspec.Struct]) -> dict[str, str]:
    return {str(kind.__struct_config__.tag): kind.__name__ for kind in kinds}


def _request_frame(kind: str, body: type[msgspec.Struct]) -> dict[str, Any]:
    frame = {
        "type": "object",
        "properties": {
            "type": {"const": kind},
            "id": {
                "type": "string",
                "description": "Chosen by the client, and that of no request which has not ended.",
                "minLength": 1,
                "maxLength": 256,
            },
            "stream": {"description": "Answers always come in chunks.", "enum": [True, None]},
        },
        "required": ["type", "id"],
    }
    about = f"A request with the fields of `{body.__name__}`."
    return {"description": about, "allOf": [component(body.__name__), frame]}


UNIONS: dict[str, dict[str, Any]] = {
    "CompletionEvent": _union("The data of an event of a streamed completion.", ("CompletionChunk", "Error")),
    "ChatEvent": _union("The data of an event of a streamed chat completion.", ("ChatChunk", "Error")),
    "ResponseEvent": _by("type", "The data of an event of a streamed response.", _tags(*RESPONSE_EVENTS)),
    "MessageEvent": _by("type", "The data of an event of a streamed message.", _tags(*MESSAGE_EVENTS)),
    "CompletionFrame": _request_frame("completion", CompletionBody),
    "ChatFrame": _request_frame("chat", ChatBody),
    "ChunkFrame": _by(
        "object",
        "The next piece of an answer.",
        {"text_completion": "CompletionChunkFrame", "chat.completion.chunk": "ChatChunkFrame"},
    ),
    "ClientFrame": _by(
        "type",
        "A frame that clients send.",
        {
            "completion": "CompletionFrame",
            "chat": "ChatFrame",
            **_tags(CancelFrame, WatchFrame, AuthFrame),
        },
    ),
    "ServerFrame": _by(
        "type",
        "A frame that the server sends.",
        {"chunk": "ChunkFrame", **_tags(DoneFrame, ErrorFrame, EngineFrame)},
    ),
}
"""Schemas by name."""
