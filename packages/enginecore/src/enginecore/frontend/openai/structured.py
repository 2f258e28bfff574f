"""The fields of a body that say of which form the output is."""

from collections.abc import Callable, Mapping
from typing import Any

from enginecore.errors import RequestError
from enginecore.frontend.openai.bodies import Body
from enginecore.structured_outputs import StructuredOutputsParams

_OLDER = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's older fields, and the field of StructuredOutputsParams that each is."""

_NAME_LENGTH = 64
"""Most characters of a schema's name, as in OpenAI's API."""


def guide_field(body: Body) -> str | None:
    """Return the field that says of which form the output is; None where the body leaves it open.

    Raises:
        RequestError: there are two.
    """
    given = [name for name in ("structured_outputs", *_OLDER) if getattr(body, name) is not None]
    if body.response_format is not None and body.response_format.get("type") != "text":
        given.insert(0, "response_format")
    if len(given) > 1:
        raise RequestError(
            f"{given[0]} and {given[1]} both say of which form the output is: give one", given[1]
        )
    return given[0] if given else None


def structured_outputs(body: Body) -> StructuredOutputsParams | None:
    """Return the form of the output that a body asks for.

    Raises:
        RequestError: it asks for two, or one of its fields is wrong; with the field as its `param`.
    """
    field = guide_field(body)
    if body.guided_whitespace_pattern is not None and field != "guided_json":
        raise RequestError("guided_whitespace_pattern needs guided_json", "guided_whitespace_pattern")
    if field is None:
        return None
    try:
        if field == "response_format":
            return StructuredOutputsParams.of(_response_format(body.response_format or {}))
        if field == "structured_outputs":
            return StructuredOutputsParams.of(body.structured_outputs)
        fields = {_OLDER[field]: getattr(body, field), "whitespace_pattern": body.guided_whitespace_pattern}
        return StructuredOutputsParams.of(fields)
    except ValueError as error:
        raise RequestError(f"{field}: {error}", field) from error


def _response_format(given: Mapping[str, Any]) -> dict[str, Any]:
    kind = given.get("type")
    read = _FORMATS.get(kind) if isinstance(kind, str) else None
    if read is None:
        known = ", ".join(("text", *_FORMATS))
        raise ValueError(f"type must be one of {known}, got {kind!r:.80}")
    return read(given)


def _json_schema(given: Mapping[str, Any]) -> dict[str, Any]:
    described = given.get("json_schema")
    if not isinstance(described, Mapping):
        raise ValueError('json_schema must be an object with "name" and "schema"')
    if not isinstance(described.get("schema"), Mapping):
        raise ValueError("json_schema.schema must be a JSON Schema, an object")
    name = described.get("name")
    if name is not None and (not isinstance(name, str) or not 0 < len(name) <= _NAME_LENGTH):
        raise ValueError(
            f"json_schema.name must be a text of 1 to {_NAME_LENGTH} characters, got {name!r:.80}"
        )
    strict = described.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise ValueError(f"json_schema.strict must be true or false, got {strict!r:.80}")
    return {"json": described["schema"]}


_FORMATS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "json_object": lambda given: {"json_object": True},
    "json_schema": _json_schema,
    "structural_tag": lambda given: {"structural_tag": given},
}
