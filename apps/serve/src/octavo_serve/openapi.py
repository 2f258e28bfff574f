"""The OpenAPI document: what each route takes and answers.

Reference: https://spec.openapis.org/oas/v3.1.0
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any, NamedTuple

import msgspec

from enginecore import __version__
from enginecore.frontend.openai import ChatBody, CompletionBody, EmbeddingBody, RerankBody, ScoreBody
from octavo_serve.auth import OPEN_PATHS
from octavo_serve.errors import is_anthropic
from octavo_serve.formats.anthropic_body import CountBody, MessagesBody
from octavo_serve.formats.responses_body import ResponsesBody
from octavo_serve.routes import admin, embeddings, experts, generate, messages, models, responses, status
from octavo_serve.schemas.anthropic import AnthropicError, InputMessage, Message, TokenCount
from octavo_serve.schemas.openai import (
    ChatChunk,
    ChatCompletion,
    ChatMessage,
    Completion,
    CompletionChunk,
    Error,
    Model,
    Models,
)
from octavo_serve.schemas.pooling import Embeddings, Ranking, Scores
from octavo_serve.schemas.responses import DeletedResponse, InputItems, Response
from octavo_serve.schemas.service import DetokenizedText, Health, Load, Reloading, Tokens, Version

Route = tuple[str, str, FunctionType]
"""Method, path and endpoint."""

_BODY = (400, 404, 413, 415, 503)
_GENERATES = (400, 404, 413, 415, 429, 503)

_ERRORS = {
    400: "The request is wrong: a field has a wrong type or value, or the prompt is too long.",
    401: "No valid API key was sent.",
    404: "There is no such model or object.",
    413: "The body is larger than the server takes.",
    415: "The body is not declared as application/json.",
    429: "The queue is full, or the client runs as many requests as its key may.",
    500: "The server failed to answer.",
    503: "No request can be taken now: the model loads, or the server shuts down.",
}

_HEADERS: dict[int, dict[str, Any]] = {
    401: {"WWW-Authenticate": {"description": "Bearer", "schema": {"type": "string"}}},
    429: {"Retry-After": {"description": "In seconds", "schema": {"type": "integer", "minimum": 1}}},
}

_PARAMETERS = {
    "response_id": "The id of a stored response.",
    "name": "A name of the served model; a / in it may be sent as it is.",
}

_CHUNKS = "With `stream: true`, server-sent events: the data of each is a `{}`, that of the last `[DONE]`."
_EVENTS = "With `stream: true`, server-sent events as in {}."

_ABOUT = (
    "Inference of one large language model, in the formats of OpenAI and Anthropic.\n\nWebSocket /v1/stream,"
    " which this format has no word for, takes completions and chats too. Of a body's fields a null counts as"
    " absent, and unknown ones are ignored."
)


class _Operation(NamedTuple):
    """Body, answers and parameters of an endpoint."""

    tag: str
    answer: Any
    """A type, None for an empty answer."""
    errors: tuple[int, ...] = ()
    body: type[msgspec.Struct] | None = None
    stream: str | None = None
    """Describes the answer as a stream, if it can be one."""
    status: int = 200
    media_type: str = "application/json"


_OPERATIONS: dict[FunctionType, _Operation] = {
    generate.create_completion: _Operation(
        "OpenAI", Completion, _GENERATES, CompletionBody, _CHUNKS.format("CompletionChunk")
    ),
    generate.create_chat_completion: _Operation(
        "OpenAI", ChatCompletion, _GENERATES, ChatBody, _CHUNKS.format("ChatChunk")
    ),
    embeddings.create_embeddings: _Operation("OpenAI", Embeddings, _GENERATES, EmbeddingBody),
    embeddings.score: _Operation("Scores", Scores, _GENERATES, ScoreBody),
    embeddings.rerank: _Operation("Scores", Ranking, _GENERATES, RerankBody),
    responses.create_response: _Operation(
        "OpenAI", Response, _GENERATES, ResponsesBody, _EVENTS.format("OpenAI's Responses API")
    ),
    responses.show_response: _Operation("OpenAI", Response, (404,)),
    responses.delete_response: _Operation("OpenAI", DeletedResponse, (404,)),
    responses.list_input_items: _Operation("OpenAI", InputItems, (404,)),
    messages.create_message: _Operation(
        "Anthropic", Message, _GENERATES, MessagesBody, _EVENTS.format("Anthropic's Messages API")
    ),
    messages.count_tokens: _Operation("Anthropic", TokenCount, _BODY, CountBody),
    models.list_models: _Operation("OpenAI", Models, (503,)),
    models.show_model: _Operation("OpenAI", Model, (404, 503)),
    models.tokenize: _Operation("Tokens", Tokens, _BODY, models.TokenizeBody),
    models.detokenize: _Operation("Tokens", DetokenizedText, _BODY, models.DetokenizeBody),
    status.health: _Operation("Operation", Health, (503,)),
    status.version: _Operation("Operation", Version),
    status.load: _Operation("Operation", Load),
    status.metrics: _Operation("Operation", str, media_type="text/plain"),
    experts.expert_loads: _Operation("Operation", list[list[int]], (404, 503)),
    experts.reload_placement: _Operation("Operation", Reloading, (400,), status=202),
    admin.reset_prefix_cache: _Operation("Operation", None, (503,)),
}

_TEXTS = {"type": "array", "items": {"type": "string"}}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT = {
    "description": "A text, a list of texts, token ids, or a list of lists of token ids.",
    "anyOf": [{"type": "string"}, _TEXTS, _TOKENS, {"type": "array", "items": _TOKENS, "minItems": 1}],
}


def _ref(kind: str, name: str) -> dict[str, str]:
    return {"$ref": f"#/components/{kind}/{name}"}


def _list_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"type": "array", "items": _ref("schemas", kind.__name__), "minItems": 1}


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

_BESIDE = (
    Error,
    AnthropicError,
    CompletionChunk,
    ChatChunk,
    ChatMessage,
    InputMessage,
)
"""Types that no operation has as its body or answer."""


def document(routes: Iterable[Route], *, needs_key: bool, root_path: str = "") -> dict[str, Any]:
    """Return the document of `routes`.

    `needs_key` says whether clients must send a key, and `root_path` what a proxy puts before the paths.
    """
    routes = list(routes)
    operations = [_OPERATIONS[endpoint] for _, _, endpoint in routes]
    types = [kind for one in operations for kind in (one.body, one.answer) if kind is not None]
    unique = list(dict.fromkeys([*filter(_is_struct, types), *_BESIDE]))
    _, components = msgspec.json.schema_components(unique, ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for (method, path, endpoint), one in zip(routes, operations, strict=True):
        entry = paths.setdefault(re.sub(r":\w+", "", path), {})
        entry[method.lower()] = _operation(path, endpoint, one, needs_key=needs_key)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": __version__, "description": _ABOUT},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": _refined(components),
            "responses": {
                _error_name(code, anthropic=anthropic): _error(code, anthropic=anthropic)
                for code in _ERRORS
                for anthropic in (False, True)
            },
            "headers": {
                "RequestId": {
                    "description": "The request's `X-Request-Id`, or a new one.",
                    "schema": {"type": "string"},
                }
            },
            **({"securitySchemes": _SECURITY_SCHEMES} if needs_key else {}),
        },
    }


_SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _refined(components: Mapping[str, Any]) -> dict[str, Any]:
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


def _operation(path: str, endpoint: FunctionType, one: _Operation, *, needs_key: bool) -> dict[str, Any]:
    guarded = needs_key and path not in OPEN_PATHS
    codes = sorted({*one.errors, 500, *([401] if guarded else [])})
    anthropic = is_anthropic(path)
    found: dict[str, Any] = {
        "operationId": f"{endpoint.__name__}_{path.strip('/').partition('/')[0]}",
        "summary": (inspect.getdoc(endpoint) or "").partition("\n")[0].rstrip("."),
        "tags": [one.tag],
        "responses": {
            str(one.status): _answer(one),
            **{str(code): _ref("responses", _error_name(code, anthropic=anthropic)) for code in codes},
        },
    }
    if "{" in path:
        found["parameters"] = [
            {
                "name": name,
                "in": "path",
                "required": True,
                "description": _PARAMETERS[name],
                "schema": {"type": "string", "minLength": 1},
            }
            for name in re.findall(r"{(\w+)", path)
        ]
    if one.body is not None:
        schema = _ref("schemas", one.body.__name__)
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if guarded:
        found["security"] = [{name: []} for name in _SECURITY_SCHEMES]
    return found


def _answer(one: _Operation) -> dict[str, Any]:
    description = "The answer." if one.status == 200 else "It was begun."
    found: dict[str, Any] = {
        "description": f"{description} {one.stream}" if one.stream else description,
        "headers": {"X-Request-Id": _ref("headers", "RequestId")},
    }
    if one.answer is None:
        return found
    named = _is_struct(one.answer)
    schema = _ref("schemas", one.answer.__name__) if named else msgspec.json.schema(one.answer)
    content: dict[str, Any] = {one.media_type: {"schema": schema}}
    if one.stream is not None:
        # OpenAPI has a schema for events from 3.2 on only, which few tools read yet.
        content["text/event-stream"] = {}
    return {**found, "content": content}


def _error_name(code: int, *, anthropic: bool) -> str:
    return f"{'AnthropicError' if anthropic else 'Error'}{code}"


def _error(code: int, *, anthropic: bool) -> dict[str, Any]:
    schema = _ref("schemas", "AnthropicError" if anthropic else "Error")
    # Who answers what nobody foresaw stands outside of who adds the id.
    own = {} if code == 500 else {"X-Request-Id": _ref("headers", "RequestId")}
    headers = {**own, **_HEADERS.get(code, {})}
    found: dict[str, Any] = {
        "description": _ERRORS[code],
        "content": {"application/json": {"schema": schema}},
    }
    return {**found, "headers": headers} if headers else found
