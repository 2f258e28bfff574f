"""An OpenAPI document as one HTML page: no script, nothing from elsewhere."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; }
body { max-width: 60rem; margin: 0 auto; padding: 1rem; font: 15px/1.5 system-ui, sans-serif; }
h2 { margin: 1.5rem 0 .5rem; font-size: 1.1rem; }
details { border: 1px solid light-dark(#85817a, #7d828a); border-radius: 6px; margin: .4rem 0; }
details > div { padding: 0 .8rem .8rem; overflow-x: auto; }
summary { padding: .4rem .8rem; cursor: pointer; }
summary b { display: inline-block; min-width: 4rem; }
code { font: 13px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
th { font-weight: 600; }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; }
tr + tr > * { border-top: 1px solid light-dark(#dedbd3, #34383e); }
"""

_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

HEADERS = {
    # Nothing but the style that is in the page, and no other page may show this one in a frame.
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def docs_page(document: Mapping[str, Any]) -> str:
    """Return the page of a document as `octavo_serve.openapi` makes it."""
    info = document["info"]
    by_tag: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            shown = _operation(method, path, operation, document["components"])
            by_tag.setdefault(operation["tags"][0], []).append(shown)
    routes = "".join(f"<h2>{escape(tag)}</h2>{''.join(shown)}" for tag, shown in by_tag.items())
    sockets = "".join(_socket(path, one) for path, one in document.get("x-websockets", {}).items())
    if sockets:
        routes += f"<h2>WebSocket</h2>{sockets}"
    types = "".join(_type(name, schema) for name, schema in document["components"]["schemas"].items())
    about = "".join(f"<p>{_prose(part)}</p>" for part in info["description"].split("\n\n"))
    title = f"{escape(info['title'])} {escape(info['version'])}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}: routes</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>{about}"
        '<p>For programs: <a href="openapi.json">openapi.json</a></p>'
        f"<main>{routes}<h2>Types</h2>{types}</main></body></html>"
    )


def _operation(method: str, path: str, operation: Mapping[str, Any], components: Mapping[str, Any]) -> str:
    rows = [
        (f"<code>{escape(one['name'])}</code> in the path", _prose(one["description"]))
        for one in operation.get("parameters", ())
    ]
    if "requestBody" in operation:
        rows.append(("body", _content(operation["requestBody"])))
    if "security" in operation:
        rows.append(("key", "<code>Authorization: Bearer KEY</code> or <code>x-api-key: KEY</code>"))
    for code, given in operation["responses"].items():
        answer = components["responses"][given["$ref"].rpartition("/")[2]] if "$ref" in given else given
        rows.append((code, f"{_prose(answer['description'])}<br>{_content(answer)}"))
    return _folded(
        f"<b>{method.upper()}</b> <code>{escape(path)}</code> {_prose(operation['summary'])}", _table(rows)
    )


def _socket(path: str, socket: Mapping[str, Any]) -> str:
    rows = [
        ("frames", _prose(socket["description"])),
        ("client sends", _schema(socket["receives"])),
        ("server sends", _schema(socket["sends"])),
    ]
    return _folded(f"<b>WS</b> <code>{escape(path)}</code> {_prose(socket['summary'])}", _table(rows))


def _content(holder: Mapping[str, Any]) -> str:
    """Return the types that a body or an answer may have."""
    shown = []
    for media_type, entry in holder.get("content", {}).items():
        kind = _schema(entry["schema"]) if "schema" in entry else "events"
        shown.append(f"<code>{media_type}</code> {kind}")
    return "<br>".join(shown)


def _type(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        (
            f"<code>{escape(field)}</code>{', required' if field in required else ''}",
            f"{_schema(one)} {_prose(one.get('description', ''))}",
        )
        for field, one in schema.get("properties", {}).items()
    ]
    for one in schema.get("anyOf", ()):
        fields = " and ".join(f"<code>{escape(field)}</code>" for field in one.get("required", ()))
        rows.append(("either", fields or _schema(one)))
    rows += [("all of", _schema(one)) for one in schema.get("allOf", ())]
    summary = f"<code>{escape(name)}</code> {_prose(schema.get('description', ''))}"
    return f'<section id="{escape(name)}">{_folded(summary, _table(rows))}</section>'


def _schema(schema: Mapping[str, Any]) -> str:
    """Return a schema in a few words, with a link where it is a type of its own."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(map(_schema, schema["anyOf"]))
    if "const" in schema:
        return f"<code>{escape(json.dumps(schema['const']))}</code>"
    if "enum" in schema:
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"])
    kind = schema.get("type", "anything")
    if kind == "object" and "properties" in schema:
        fields = (f"<code>{escape(name)}</code> {_schema(one)}" for name, one in schema["properties"].items())
        return f"object of {', '.join(fields)}"
    if kind == "array":
        return f"array of {_inner(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_inner(schema['additionalProperties'])}"
    return escape(kind)


def _inner(schema: Mapping[str, Any]) -> str:
    return f"({_schema(schema)})" if "anyOf" in schema else _schema(schema)


def _prose(text: str) -> str:
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _table(rows: list[tuple[str, str]]) -> str:
    shown = "".join(f'<tr><th scope="row">{name}</th><td>{text}</td></tr>' for name, text in rows)
    return f"<table>{shown}</table>" if rows else ""


def _folded(summary: str, inner: str) -> str:
    return f"<details><summary>{summary}</summary><div>{inner}</div></details>"
