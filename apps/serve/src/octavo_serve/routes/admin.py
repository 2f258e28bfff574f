"""Routes that change what all clients share; served with `admin_routes` only."""

from starlette.requests import Request
from starlette.responses import Response

from octavo_serve.routes.requests import server_of


async def reset_prefix_cache(request: Request) -> Response:
    """Have all ranks forget cached prefixes that no request uses."""
    server = server_of(request)
    server.require_ready()
    await server.engine.reset_prefix_cache()
    return Response()
