"""GET /expert_loads and POST /expert_placement/reload."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo_serve.errors import ApiError
from octavo_serve.messages import ReloadExperts
from octavo_serve.routes.requests import server_of


async def expert_loads(request: Request) -> Response:
    """Return how many tokens went to each expert of each layer, as `tools/expert_placement.py` reads it."""
    server = server_of(request)
    server.require_ready()
    loads = await server.engine.expert_loads()
    if loads is None:
        raise ApiError(404, "the model has no experts")
    return JSONResponse(loads.tolist())


async def reload_placement(request: Request) -> Response:
    """Read the file of --expert-placement again: all ranks start again with it, and their requests go on."""
    server = server_of(request)
    if server.engine.config.expert_placement is None:
        raise ApiError(400, "the server was started without --expert-placement: there is no file to read")
    server.report(ReloadExperts())
    return JSONResponse({"status": "reloading"}, 202)
