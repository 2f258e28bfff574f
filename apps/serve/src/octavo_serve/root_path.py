"""The path that a proxy in front of the server puts before the routes."""

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Tells the application of its root path, whether the proxy leaves it in a request's path or not.

    The root path without a slash at its end is sent on to the one with it, as the page's links need that.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == self._root and scope["type"] == "http":
            await RedirectResponse(self._root + "/")(scope, receive, send)
            return
        whole = path if path.startswith(self._root + "/") else self._root + path
        await self._app({**scope, "root_path": self._root, "path": whole}, receive, send)


def route_path(scope: Scope) -> str:
    """Return the path of a request without what a proxy puts before the routes."""
    path, root = scope["path"], scope.get("root_path", "")
    return path.removeprefix(root) if root and path.startswith(root + "/") else path
