"""The application: routes, errors, and who may call."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.middleware import Middleware

from enginecore import __version__
from octavo_serve.access import AccessLog
from octavo_serve.auth import KeyGuard
from octavo_serve.config import ServeConfig
from octavo_serve.errors import HANDLERS
from octavo_serve.limits import Limits
from octavo_serve.messages import HttpMessage
from octavo_serve.response_store import ResponseStore
from octavo_serve.root_path import RootPath
from octavo_serve.routes import (
    admin,
    docs,
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
    from octavo_serve.span_export import Traces

_ROUTES = (
    ("POST", "/v1/completions", generate.create_completion),
    ("POST", "/v1/chat/completions", generate.create_chat_completion),
    ("POST", "/v1/embeddings", embeddings.create_embeddings),
    ("POST", "/score", embeddings.score),
    ("POST", "/v1/score", embeddings.score),
    ("POST", "/rerank", embeddings.rerank),
    ("POST", "/v1/rerank", embeddings.rerank),
    ("POST", "/v2/rerank", embeddings.rerank),
    ("POST", "/v1/responses", responses.create_response),
    ("GET", "/v1/responses/{response_id}", responses.show_response),
    ("DELETE", "/v1/responses/{response_id}", responses.delete_response),
    ("GET", "/v1/responses/{response_id}/input_items", responses.list_input_items),
    ("POST", "/v1/messages", messages.create_message),
    ("POST", "/v1/messages/count_tokens", messages.count_tokens),
    ("GET", "/v1/models", models.list_models),
    ("GET", "/v1/models/{name:path}", models.show_model),
    ("POST", "/tokenize", models.tokenize),
    ("POST", "/detokenize", models.detokenize),
    ("GET", "/health", status.health),
    ("GET", "/ping", status.health),
    ("GET", "/version", status.version),
    ("GET", "/expert_loads", experts.expert_loads),
    ("POST", "/expert_placement/reload", experts.reload_placement),
    ("GET", "/load", status.load),
    ("GET", "/metrics", status.metrics),
)

_ADMIN_ROUTES = (("POST", "/reset_prefix_cache", admin.reset_prefix_cache),)
"""Method, path and endpoint; `octavo_serve.openapi` describes what each takes and answers."""


def create_app(
    engine: "AsyncEngine",
    options: ServeConfig,
    report: Callable[[HttpMessage], None] = lambda message: None,
    limits: Limits | None = None,
    stored: ResponseStore | None = None,
    traces: "Traces | None" = None,
) -> FastAPI:
    """Return the ASGI application; its `state.server` is the `ServerState` that the routes share.

    `report` tells the supervisor; `limits` and `stored` are those of all HTTP processes, by default of this
    one alone. `traces` takes the spans of requests that generate.
    """
    routes = _ROUTES + _ADMIN_ROUTES if options.admin_routes else _ROUTES
    paths = frozenset((*(path for _, path, _ in routes), *docs.DOCS_PATHS, *page.PAGE_PATHS))
    middleware = [Middleware(RootPath, root_path=options.root_path)] if options.root_path else []
    middleware += [Middleware(AccessLog, metrics=engine.metrics, routes=paths, traces=traces)]
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
        openapi_url=None,
        redirect_slashes=False,
        middleware=middleware,
        exception_handlers=HANDLERS,
    )
    described = docs.Docs(routes, needs_key=bool(keys), root_path=options.root_path)
    routes += ("GET", docs.DOCUMENT, described.show_document), ("GET", docs.PAGE, described.show_page)
    for method, path, endpoint in routes:
        # Whoever only asks whether something is there sends HEAD; the HTTP server leaves the body out.
        methods = ["GET", "HEAD"] if method == "GET" else [method]
        app.add_api_route(path, endpoint, methods=methods, response_model=None)
    if options.live_page:
        for path in page.PAGE_PATHS:
            app.add_api_route(path, page.show_page, methods=["GET", "HEAD"])
    app.add_api_websocket_route(stream.PATH, stream.serve)
    app.add_api_route(stream.PATH, stream.require_upgrade, methods=["GET", "HEAD"])
    app.state.server = ServerState(engine, options, report, limits, stored, traces)
    return app
