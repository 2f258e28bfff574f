"""Compare what the server sends with its OpenAPI document, by jsonschema."""

from typing import Any

import jsonschema


def strict(schema: Any) -> Any:
    """A schema whose objects have no other fields than those it names."""
    if isinstance(schema, dict):
        closed = {"additionalProperties": False} if schema.get("properties") else {}
        return {**closed, **{key: strict(value) for key, value in schema.items()}}
    return [strict(value) for value in schema] if isinstance(schema, list) else schema


class Documented:
    """The types of a document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._schemas = {key: strict(schema) for key, schema in document["components"]["schemas"].items()}
        self._validators: dict[str, jsonschema.Draft202012Validator] = {}

    def check(self, name: str, value: Any) -> None:
        """Compare a value with a type, which must name all of its fields.

        Of a union it must be the member that the discriminator tells.

        Raises:
            jsonschema.ValidationError: it is not of that type.
        """
        union = self._schemas[name].get("discriminator")
        if union is not None:
            kind = value.get(union["propertyName"])
            if not isinstance(kind, str) or kind not in union["mapping"]:
                raise jsonschema.ValidationError(f"{name} has no such member: {value}")
            member = union["mapping"][kind]
            assert {"$ref": member} in self._schemas[name]["anyOf"]
            self.check(member.rpartition("/")[2], value)
            return
        if name not in self._validators:
            root = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": self._schemas}}
            self._validators[name] = jsonschema.Draft202012Validator(root)
        self._validators[name].validate(value)


def check(document: dict[str, Any], name: str, value: Any) -> None:
    """Compare one value with a type of the document, as `Documented.check` does."""
    Documented(document).check(name, value)


def event_schema(document: dict[str, Any], path: str) -> str:
    """Return the name of the type of a streamed answer's events, as the route describes it."""
    media = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    data = media["x-itemSchema"]["properties"]["data"]
    described = next(one for one in data.get("anyOf", [data]) if "contentSchema" in one)
    return described["contentSchema"]["$ref"].rpartition("/")[2]
