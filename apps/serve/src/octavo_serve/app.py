"""The application: routes, errors, and who may call."""

from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from octavo_serve.access import KeyGuard
from octavo_serve.config import ServeConfig
from octavo_serve.errors import HANDLERS
from octavo_serve.routes import generate, models, status
from octavo_serve.state import ServerState

if TYPE_CHECKING:
    from enginecore.async_engine import AsyncEngine

_ROUTES = (
    ("POST", "/v1/completions", generate.create_completion),
    ("POST", "/v1/chat/completions", generate.create_chat_completion),
    ("GET", "/v1/models", models.list_models),
    ("GET", "/v1/models/{name:path}", models.show_model),
    ("POST", "/tokenize", models.tokenize),
    ("POST", "/detokenize", models.detokenize),
    ("GET", "/health", status.health),
    ("GET", "/ping", status.health),
    ("GET", "/version", status.version),
    ("GET", "/load", status.load),
    ("GET", "/metrics", status.metrics),
)


def create_app(engine: "AsyncEngine", options: ServeConfig) -> Starlette:
    """Return the ASGI application; its `state.server` is the `ServerState` that the routes share."""
    middleware = []
    if options.cors_origins:
        from starlette.middleware.cors import CORSMiddleware

        origins = options.cors_origins
        middleware.append(
            Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        )
    if options.api_key is not None:
        middleware.append(Middleware(KeyGuard, key=options.api_key))
    routes = [Route(path, endpoint, methods=[method]) for method, path, endpoint in _ROUTES]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=HANDLERS)
    app.state.server = ServerState(engine, options)
    return app
