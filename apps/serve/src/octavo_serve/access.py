"""A line in the log for each HTTP request, and its count by route and status."""

import logging
import re
import time
from typing import TYPE_CHECKING
from uuid import uuid4

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo_serve.records import CLIENT_LEFT, Answered, RequestRecord
from octavo_serve.root_path import route_path
from octavo_serve.spans import OPERATIONS

if TYPE_CHECKING:
    from enginecore.metrics import Metrics
    from octavo_serve.span_export import Traces

PROBES = frozenset({"/health", "/ping", "/load", "/metrics", "/version"})
"""Routes that supervisors ask every few seconds, also while the model loads: logged at debug only."""

_PAGE_PART = "/page/"
"""Beginning of the routes of the live page's parts, which are logged at debug only too."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_LONGEST_PATH = 200
_RECORD, _ID = "octavo.record", "octavo.request_id"
"""Keys of the request's record and id in its ASGI scope."""
_HARMLESS_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

logger = logging.getLogger(__name__)


def request_id(request: Request) -> str:
    """Return the id of a request that `AccessLog` let through: its X-Request-Id, else a new one."""
    return request.scope[_ID]


def record_of(request: Request) -> RequestRecord:
    """Return the record of a request that `AccessLog` let through."""
    return request.scope[_RECORD]


class AccessLog:
    """Gives every HTTP request an id, which its answer carries; logs and counts it once it is answered.

    A request that generates gets its span then, too.
    """

    def __init__(
        self, app: ASGIApp, metrics: "Metrics", routes: frozenset[str], traces: "Traces | None" = None
    ) -> None:
        """`routes` are the paths of requests that were refused before they were routed."""
        self._app = app
        self._metrics = metrics
        self._routes = routes
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope[_RECORD] = RequestRecord()
        identity = scope[_ID] = _identity(scope)
        started = time.perf_counter()
        status = CLIENT_LEFT

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = (b"x-request-id", identity.encode())
                message = {**message, "headers": [*message.get("headers", ()), own]}
            await send(message)

        try:
            await self._app(scope, receive, note)
        except Exception:
            status = 500
            raise
        finally:
            self._log(scope, record, status, time.perf_counter() - started)

    def _log(self, scope: Scope, record: RequestRecord, status: int, seconds: float) -> None:
        path = route_path(scope)
        route = scope["route"].path if "route" in scope else path if path in self._routes else "none"
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.answered(method, route, status)
        answered = Answered(method, path, route, status, scope.get("octavo.key"), record, seconds)
        operation = OPERATIONS.get((method, route))
        trace = None
        if self._traces is not None and operation is not None:
            trace = self._traces.add(scope["headers"], operation, answered)
        log_request(answered, trace)


def log_request(answered: Answered, trace: str | None = None) -> None:
    """Log a request that has been answered; `trace` is the id of its trace."""
    fields = {
        "method": answered.method,
        "path": answered.path[:_LONGEST_PATH],
        "status": answered.status,
        **({"key": answered.key} if answered.key else {}),
        **answered.record.fields(),
        "total": answered.seconds,
        **({"trace_id": trace} if trace else {}),
    }
    is_quiet = answered.route in PROBES or answered.route.startswith(_PAGE_PART)
    logger.log(logging.DEBUG if is_quiet else logging.INFO, "request", extra={"fields": fields})


def _identity(scope: Scope) -> str:
    given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    return given if _HARMLESS_ID.fullmatch(given) else uuid4().hex
