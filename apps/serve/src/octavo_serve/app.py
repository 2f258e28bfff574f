"""The application: routes, errors, and who may call."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI
from fastapi.middleware import Middleware

from enginecore import __version__
from enginecore.frontend.openai import ChatBody, CompletionBody, EmbeddingBody, RerankBody, ScoreBody
from octavo_serve.access import AccessLog
from octavo_serve.auth import KeyGuard
from octavo_serve.config import ServeConfig
from octavo_serve.errors import HANDLERS
from octavo_serve.formats.anthropic_body import CountBody, MessagesBody
from octavo_serve.formats.responses_body import ResponsesBody
from octavo_serve.limits import Limits
from octavo_serve.messages import HttpMessage
from octavo_serve.response_store import ResponseStore
from octavo_serve.root_path import RootPath
from octavo_serve.routes import (
    admin,
    embeddings,
    experts,
    generate,
    messages,
    models,
    page,
    responses,
    status,
    stream,
)
from octavo_serve.state import ServerState

if TYPE_CHECKING:
    from enginecore import AsyncEngine

_ROUTES = (
    ("POST", "/v1/completions", generate.create_completion, CompletionBody),
    ("POST", "/v1/chat/completions", generate.create_chat_completion, ChatBody),
    ("POST", "/v1/embeddings", embeddings.create_embeddings, EmbeddingBody),
    ("POST", "/score", embeddings.score, ScoreBody),
    ("POST", "/v1/score", embeddings.score, ScoreBody),
    ("POST", "/rerank", embeddings.rerank, RerankBody),
    ("POST", "/v1/rerank", embeddings.rerank, RerankBody),
    ("POST", "/v2/rerank", embeddings.rerank, RerankBody),
    ("POST", "/v1/responses", responses.create_response, ResponsesBody),
    ("GET", "/v1/responses/{response_id}", responses.show_response, None),
    ("DELETE", "/v1/responses/{response_id}", responses.delete_response, None),
    ("GET", "/v1/responses/{response_id}/input_items", responses.list_input_items, None),
    ("POST", "/v1/messages", messages.create_message, MessagesBody),
    ("POST", "/v1/messages/count_tokens", messages.count_tokens, CountBody),
    ("GET", "/v1/models", models.list_models, None),
    ("GET", "/v1/models/{name:path}", models.show_model, None),
    ("POST", "/tokenize", models.tokenize, models.TokenizeBody),
    ("POST", "/detokenize", models.detokenize, models.DetokenizeBody),
    ("GET", "/health", status.health, None),
    ("GET", "/ping", status.health, None),
    ("GET", "/version", status.version, None),
    ("GET", "/expert_loads", experts.expert_loads, None),
    ("POST", "/expert_placement/reload", experts.reload_placement, None),
    ("GET", "/load", status.load, None),
    ("GET", "/metrics", status.metrics, None),
)

_ADMIN_ROUTES = (("POST", "/reset_prefix_cache", admin.reset_prefix_cache, None),)
"""Method, path, endpoint, and the body that the endpoint reads.

Endpoints read their bodies themselves, once, with msgspec; the framework is told of them for its schema only.
"""


def create_app(
    engine: "AsyncEngine",
    options: ServeConfig,
    report: Callable[[HttpMessage], None] = lambda message: None,
    limits: Limits | None = None,
    stored: ResponseStore | None = None,
) -> FastAPI:
    """Return the ASGI application; its `state.server` is the `ServerState` that the routes share.

    `report` tells the supervisor; `limits` and `stored` are those of all HTTP processes, by default of this
    one alone.
    """
    routes = _ROUTES + _ADMIN_ROUTES if options.admin_routes else _ROUTES
    paths = frozenset((*(path for _, path, _, _ in routes), *page.PAGE_PATHS))
    middleware = [Middleware(RootPath, root_path=options.root_path)] if options.root_path else []
    middleware += [Middleware(AccessLog, metrics=engine.metrics, routes=paths)]
    if options.cors_origins:
        from fastapi.middleware.cors import CORSMiddleware

        origins = options.cors_origins
        middleware.append(
            Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        )
    keys = options.keys()
    if keys:
        middleware.append(Middleware(KeyGuard, keys=keys))
    app = FastAPI(
        title="Octavo",
        version=__version__,
        redoc_url=None,
        redirect_slashes=False,
        middleware=middleware,
        exception_handlers=HANDLERS,
    )
    for method, path, endpoint, body in routes:
        app.add_api_route(
            path,
            endpoint,
            methods=[method],
            operation_id=f"{endpoint.__name__}_{path.strip('/').partition('/')[0]}",
            response_model=None,
            openapi_extra=None if body is None else _body_schema(body),
        )
    if options.live_page:
        for path in page.PAGE_PATHS:
            app.add_api_route(path, page.show_page, include_in_schema=False)
    app.add_api_websocket_route(stream.PATH, stream.serve)
    app.state.server = ServerState(engine, options, report, limits, stored)
    return app


def _body_schema(body: type[msgspec.Struct]) -> dict[str, Any]:
    schema = msgspec.json.schema(body, ref_template="#/components/schemas/{name}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
