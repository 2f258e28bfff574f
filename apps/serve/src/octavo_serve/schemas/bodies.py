"""Schemas of bodies where they say more than the structs that handlers decode."""

from collections.abc import Mapping
from typing import Any

import msgspec

from octavo_serve.schemas.anthropic import InputMessage
from octavo_serve.schemas.openai import ChatMessage
from octavo_serve.schemas.unions import component

MESSAGES = (ChatMessage, InputMessage)
"""Types that the schemas here refer to."""

_TEXTS = {"type": "array", "items": {"type": "string"}}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT = {
    "description": "A text, a list of texts, token ids, or a list of lists of token ids.",
    "anyOf": [{"type": "string"}, _TEXTS, _TOKENS, {"type": "array", "items": _TOKENS, "minItems": 1}],
}


def _list_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"type": "array", "items": component(kind.__name__), "minItems": 1}


_REQUIRED_FIELDS: dict[str, dict[str, Any]] = {
    "CompletionBody": {"prompt": _PROMPT},
    "EmbeddingBody": {"input": _PROMPT},
    "DetokenizeBody": {"tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}}},
    "ChatBody": {"messages": _list_of(ChatMessage)},
    "MessagesBody": {"messages": _list_of(InputMessage)},
    "CountBody": {"messages": _list_of(InputMessage)},
}
"""Schemas of fields that are checked by hand, and whose type in their struct says less."""

_TEXT_OR_TEXTS = {"anyOf": [{"type": "string"}, _TEXTS]}
_EITHER: dict[str, tuple[dict[str, Any], ...]] = {
    "ScoreBody": tuple(
        dict.fromkeys(names, _TEXT_OR_TEXTS)
        for names in (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))
    ),
    "TokenizeBody": ({"prompt": {"type": "string"}}, {"messages": _list_of(ChatMessage)}),
}
"""Groups of fields of which a body has one."""


def refined(components: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schemas, those of bodies with `_REQUIRED_FIELDS` and `_EITHER`."""
    found = dict(components)
    for name, fields in _REQUIRED_FIELDS.items():
        if name in found:
            schema = found[name]
            required = [*dict.fromkeys([*schema.get("required", []), *fields])]
            properties = {**schema["properties"], **fields}
            found[name] = {**schema, "properties": properties, "required": required}
    for name, groups in _EITHER.items():
        if name in found:
            choices = [{"required": list(fields), "properties": fields} for fields in groups]
            found[name] = {**found[name], "anyOf": choices}
    return found
