"""The OpenAPI document: what each route takes and answers.

Reference: https://spec.openapis.org/oas/v3.1.0
"""

import inspect
import re
from collections.abc import Iterable
from types import FunctionType
from typing import Any, NamedTuple

import msgspec

from enginecore import __version__
from enginecore.frontend.openai import ChatBody, CompletionBody, EmbeddingBody, RerankBody, ScoreBody
from octavo_serve.auth import OPEN_PATHS
from octavo_serve.errors import is_anthropic
from octavo_serve.formats.anthropic_body import CountBody, MessagesBody
from octavo_serve.formats.responses_body import ResponsesBody
from octavo_serve.routes import (
    admin,
    embeddings,
    experts,
    generate,
    messages,
    models,
    responses,
    status,
    stream,
)
from octavo_serve.schemas.anthropic import AnthropicError, Message, TokenCount
from octavo_serve.schemas.bodies import MESSAGES, refined
from octavo_serve.schemas.openai import ChatCompletion, Completion, Error, Model, Models
from octavo_serve.schemas.pooling import Embeddings, Ranking, Scores
from octavo_serve.schemas.responses import DeletedResponse, InputItems, Response
from octavo_serve.schemas.service import DetokenizedText, Health, Load, Reloading, Tokens, Unhealthy, Version
from octavo_serve.schemas.unions import MEMBERS, UNIONS, component

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

_RETRY_AFTER = {"description": "In seconds", "schema": {"type": "integer", "minimum": 1}}
_HEADERS: dict[int, dict[str, Any]] = {
    401: {"WWW-Authenticate": {"description": "Bearer", "schema": {"type": "string"}}},
    429: {"Retry-After": _RETRY_AFTER},
    503: {"Retry-After": {**_RETRY_AFTER, "description": "In seconds, while the model loads"}},
}

_PARAMETERS = {
    "response_id": "The id of a stored response.",
    "name": "A name of the served model; a / in it may be sent as it is.",
}

_EVENTS = "With `stream: true`, server-sent events, the data of each a `{}`{}."
_DONE = ", but that of the last `[DONE]`"

_ABOUT = (
    "Inference of one large language model, in the formats of OpenAI and Anthropic.\n\nOf a body's fields a"
    " null counts as absent, and unknown ones are ignored."
)

_WEBSOCKETS = {
    stream.PATH: {
        "summary": "Completions and chats, any number at once, answered with `chunk` frames and a `done`",
        "description": "An `error` ends the request whose id it has; one whose id is null is about a frame.",
        "receives": component("ClientFrame"),
        "sends": component("ServerFrame"),
    }
}
"""By path; OpenAPI has no word for them."""


class _Operation(NamedTuple):
    """Body, answers and parameters of an endpoint."""

    tag: str
    answer: Any
    """A type, None for an empty answer."""
    errors: tuple[int, ...] = ()
    body: type[msgspec.Struct] | None = None
    stream: str | None = None
    """The component that is the data of each event, where the answer can be a stream."""
    ends_done: bool = False
    """Whether the stream's last event is `[DONE]`."""
    status: int = 200
    unavailable: type[msgspec.Struct] | None = None
    """The answer with 503, where it is more than an error."""
    media_type: str = "application/json"


_OPERATIONS: dict[FunctionType, _Operation] = {
    generate.create_completion: _Operation(
        "OpenAI", Completion, _GENERATES, CompletionBody, "CompletionEvent", ends_done=True
    ),
    generate.create_chat_completion: _Operation(
        "OpenAI", ChatCompletion, _GENERATES, ChatBody, "ChatEvent", ends_done=True
    ),
    embeddings.create_embeddings: _Operation("OpenAI", Embeddings, _GENERATES, EmbeddingBody),
    embeddings.score: _Operation("Scores", Scores, _GENERATES, ScoreBody),
    embeddings.rerank: _Operation("Scores", Ranking, _GENERATES, RerankBody),
    responses.create_response: _Operation("OpenAI", Response, _GENERATES, ResponsesBody, "ResponseEvent"),
    responses.show_response: _Operation("OpenAI", Response, (404,)),
    responses.delete_response: _Operation("OpenAI", DeletedResponse, (404,)),
    responses.list_input_items: _Operation("OpenAI", InputItems, (404,)),
    messages.create_message: _Operation("Anthropic", Message, _GENERATES, MessagesBody, "MessageEvent"),
    messages.count_tokens: _Operation("Anthropic", TokenCount, _BODY, CountBody),
    models.list_models: _Operation("OpenAI", Models, (503,)),
    models.show_model: _Operation("OpenAI", Model, (404, 503)),
    models.tokenize: _Operation("Tokens", Tokens, _BODY, models.TokenizeBody),
    models.detokenize: _Operation("Tokens", DetokenizedText, _BODY, models.DetokenizeBody),
    status.health: _Operation("Operation", Health, (503,), unavailable=Unhealthy),
    status.version: _Operation("Operation", Version),
    status.load: _Operation("Operation", Load),
    status.metrics: _Operation("Operation", str, media_type="text/plain"),
    experts.expert_loads: _Operation("Operation", list[list[int]], (404, 503)),
    experts.reload_placement: _Operation("Operation", Reloading, (400,), status=202),
    admin.reset_prefix_cache: _Operation("Operation", None, (503,)),
}


def _ref(kind: str, name: str) -> dict[str, str]:
    return {"$ref": f"#/components/{kind}/{name}"}


_BESIDE = (AnthropicError, *MESSAGES, *MEMBERS)
"""Types that no operation has as its body or answer."""


def document(routes: Iterable[Route], *, needs_key: bool, root_path: str = "") -> dict[str, Any]:
    """Return the document of `routes`.

    `needs_key` says whether clients must send a key, and `root_path` what a proxy puts before the paths.
    """
    routes = list(routes)
    operations = [_OPERATIONS[endpoint] for _, _, endpoint in routes]
    types = [kind for one in operations for kind in (one.body, one.answer, one.unavailable)]
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
        "x-websockets": _WEBSOCKETS,
        "components": {
            "schemas": {**refined(components), **UNIONS},
            "responses": {
                _error_name(code, anthropic=anthropic): _error(code, AnthropicError if anthropic else Error)
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
    if one.unavailable is not None:
        found["responses"]["503"] = _error(503, one.unavailable)
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
        schema = component(one.body.__name__)
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if guarded:
        found["security"] = [{name: []} for name in _SECURITY_SCHEMES]
    return found


def _answer(one: _Operation) -> dict[str, Any]:
    description = "The answer." if one.status == 200 else "It was begun."
    if one.stream is not None:
        description += " " + _EVENTS.format(one.stream, _DONE if one.ends_done else "")
    found: dict[str, Any] = {
        "description": description,
        "headers": {"X-Request-Id": _ref("headers", "RequestId")},
    }
    if one.answer is None:
        return found
    named = _is_struct(one.answer)
    schema = component(one.answer.__name__) if named else msgspec.json.schema(one.answer)
    content: dict[str, Any] = {one.media_type: {"schema": schema}}
    if one.stream is not None:
        content["text/event-stream"] = {"x-itemSchema": _event(one.stream, ends_done=one.ends_done)}
    return {**found, "content": content}


def _event(name: str, *, ends_done: bool) -> dict[str, Any]:
    """Return the schema of an event as OpenAPI 3.2 has it in `itemSchema`; few tools read that yet."""
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": component(name),
    }
    if ends_done:
        data = {"anyOf": [data, {"const": "[DONE]"}]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _error_name(code: int, *, anthropic: bool) -> str:
    return f"{'AnthropicError' if anthropic else 'Error'}{code}"


def _error(code: int, answer: type[msgspec.Struct]) -> dict[str, Any]:
    # Who answers what nobody foresaw stands outside of who adds the id.
    own = {} if code == 500 else {"X-Request-Id": _ref("headers", "RequestId")}
    headers = {**own, **_HEADERS.get(code, {})}
    found: dict[str, Any] = {
        "description": _ERRORS[code],
        "content": {"application/json": {"schema": component(answer.__name__)}},
    }
    return {**found, "headers": headers} if headers else found
