"""A line in the log for each HTTP request, and its count by route and status."""

import logging
import re
import time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from enginecore import RequestOutput
from octavo_serve.root_path import route_path

if TYPE_CHECKING:
    from enginecore.metrics import Metrics

PROBES = frozenset({"/health", "/ping", "/load", "/metrics", "/version"})
"""Routes that supervisors ask every few seconds, also while the model loads: logged at debug only."""

_PAGE_PART = "/page/"
"""Beginning of the routes of the live page's parts, which are logged at debug only too."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
CLIENT_LEFT = 499
"""Logged and counted where a client went away before its answer began, as nginx does."""
_LONGEST_PATH = 200
_RECORD, _ID = "octavo.record", "octavo.request_id"
"""Keys of the request's record and id in its ASGI scope."""
_HARMLESS_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

logger = logging.getLogger(__name__)


class RequestRecord:
    """The log's facts of one request that generates: no text of prompt or answer is among them."""

    def __init__(self) -> None:
        self.id: str | None = None
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._generated = 0
        self._ttft: float | None = None
        self._reasons: dict[str, None] = {}
        self._unfinished = 0

    def begin(self, answer_id: str, prompt_tokens: list[int], samples: int) -> None:
        """Take note of a request for `samples` of each prompt."""
        self.id = answer_id
        self._prompts = dict(enumerate(prompt_tokens))
        self._unfinished = samples * len(prompt_tokens)

    def add(self, prompt: int, output: RequestOutput) -> None:
        """Take note of an output of prompt number `prompt`, which holds what is new since the last one."""
        if output.num_cached_tokens:
            self._cached[prompt] = output.num_cached_tokens
        times = output.metrics
        if self._ttft is None and times is not None and times.first_token_time is not None:
            self._ttft = times.first_token_time - times.arrival_time
        for sample in output.outputs:
            self._generated += len(sample.token_ids)
            if sample.finish_reason is not None:
                self._reasons[sample.finish_reason] = None
                self._unfinished -= 1

    def fields(self) -> dict[str, Any]:
        """Return what is known, by name; nothing for a request that did not come to generating."""
        if self.id is None:
            return {}
        reasons = [*self._reasons, *(["abort"] if self._unfinished else [])]
        found: dict[str, Any] = {
            "id": self.id,
            "prompt_tokens": sum(self._prompts.values()),
            "output_tokens": self._generated,
            "cached_tokens": sum(self._cached.values()),
        }
        if self._ttft is not None:
            found["ttft"] = self._ttft
        return {**found, "finish": ",".join(dict.fromkeys(reasons))}


def request_id(request: Request) -> str:
    """Return the id of a request that `AccessLog` let through: its X-Request-Id, else a new one."""
    return request.scope[_ID]


def record_of(request: Request) -> RequestRecord:
    """Return the record of a request that `AccessLog` let through."""
    return request.scope[_RECORD]


class AccessLog:
    """Gives every HTTP request an id, which its answer carries; logs and counts it once it is answered."""

    def __init__(self, app: ASGIApp, metrics: "Metrics", routes: frozenset[str]) -> None:
        """`routes` are the paths of requests that were refused before they were routed."""
        self._app = app
        self._metrics = metrics
        self._routes = routes

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
        log_request(method, path, route, status, scope.get("octavo.key"), record, seconds)


def log_request(
    method: str, path: str, route: str, status: int, key: str | None, record: RequestRecord, seconds: float
) -> None:
    """Log a request that has been answered; `key` is the name of its key."""
    fields = {
        "method": method,
        "path": path[:_LONGEST_PATH],
        "status": status,
        **({"key": key} if key else {}),
        **record.fields(),
        "total": seconds,
    }
    level = logging.DEBUG if route in PROBES or route.startswith(_PAGE_PART) else logging.INFO
    logger.log(level, "request", extra={"fields": fields})


def _identity(scope: Scope) -> str:
    given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    return given if _HARMLESS_ID.fullmatch(given) else uuid4().hex
