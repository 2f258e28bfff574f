"""GET /health, /ping, /version, /load and /metrics."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import enginecore
from octavo_serve.routes.requests import server_of


async def health(request: Request) -> Response:
    """Answer 200 when requests are run, "degraded" where some ranks are down; 503 when no rank is up.

    While ranks load the model, `loading` tells their progress.
    """
    server = server_of(request)
    if server.trouble is not None:
        error, progress = server.unavailable(server.trouble), server.progress
        loading = {} if progress is None else {"loading": progress.members()}
        return JSONResponse({**error.answer(), **loading}, error.status, error.headers)
    down = {str(rank): reason for rank, reason in server.engine.ranks_down.items()}
    return JSONResponse({"status": "degraded", "ranks_down": down} if down else {"status": "ok"})


async def version(request: Request) -> Response:
    """Return the version."""
    return JSONResponse({"version": enginecore.__version__})


async def load(request: Request) -> Response:
    """Return how busy the server is: HTTP requests that generate, and the engine's own queues."""
    server = server_of(request)
    stats = server.engine.stats
    return JSONResponse(
        {
            "server_load": server.engine.metrics.num_in_progress(),
            "num_requests_running": stats.running,
            "num_requests_waiting": stats.waiting,
            "kv_cache_usage": stats.kv_cache_usage,
        }
    )


async def metrics(request: Request) -> Response:
    """Return the engine's metrics in Prometheus' text format."""
    metrics = server_of(request).engine.metrics
    return Response(metrics.text(), headers={"content-type": metrics.content_type})
