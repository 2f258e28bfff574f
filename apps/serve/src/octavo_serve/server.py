"""The server's life: accept at once, load the model, serve, drain, end."""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop
from starlette.types import ASGIApp

from enginecore.errors import RequestAbortedError
from enginecore.garbage import freeze_start
from octavo_serve.app import create_app
from octavo_serve.config import ServeConfig
from octavo_serve.limits import Limits
from octavo_serve.listening import BACKLOG, url
from octavo_serve.messages import COUNTS, RESPONSES, HttpMessage, HttpReady
from octavo_serve.protocol import HttpProtocol
from octavo_serve.response_store import ResponseStore
from octavo_serve.routes.stream import MOST_FRAME_BYTES
from octavo_serve.state import ServerState
from octavo_serve.tracing import open_traces

if TYPE_CHECKING:
    from enginecore import AsyncEngine
    from enginecore.messages import EngineStats
    from octavo_serve.span_export import Traces

STOPPED = 0
ENGINE_DIED = 1

_SECONDS_TO_SEND_LAST_BYTES = 3
_SECONDS_TO_KEEP_IDLE_CONNECTIONS = 75
_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_BETWEEN_REPORTS = 10
_OPEN_FILES = 65536

logger = logging.getLogger(__name__)


def run(
    listener: socket.socket,
    make_engine: Callable[[], "AsyncEngine"],
    options: ServeConfig,
    index: int = 0,
    report: Callable[[HttpMessage], None] = lambda message: None,
    started: int | None = None,
    at_once: bool = True,
    shared: Path | None = None,
) -> int:
    """Serve on `listener` until a signal asks to stop or the engine dies; return the exit status.

    `index` is this process's among those that serve on it, of which the first logs for all. `report` tells
    the supervisor. The server was `started` then, in seconds since the epoch; now if None.
    With `at_once` connections are accepted while the model loads, to say so; else others serve meanwhile, and
    they are accepted once requests are taken. `shared` is the folder that all processes
    share, with their counts for limits and stored responses.

    Raises:
        OctavoError: the engine could not start.
    """
    _allow_open_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        endpoint = options.otlp_traces_endpoint
        traces = None if endpoint is None else open_traces(endpoint)
        keys = list(options.keys())
        if shared is None:
            app_state = Limits(options, keys), None
        else:
            app_state = Limits(options, keys, shared / COUNTS, index), ResponseStore(shared / RESPONSES)
        life = _Life(listener, make_engine(), options, app_state, index, report, started, at_once, traces)
        return runner.run(life.run())


class _Listener(uvicorn.Server):
    """uvicorn without its own signal handling, which would end the process by the signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def http_server(app: ASGIApp, options: ServeConfig) -> uvicorn.Server:
    """Return the server of HTTP and WebSockets that runs `app`, with nothing of signals."""
    return _Listener(
        uvicorn.Config(
            app,
            http=HttpProtocol,
            # Waits for slow readers since uvicorn 0.53.
            ws="websockets-sansio",
            # Frames up to here are read, to answer the longer ones among them; beyond it the socket ends.
            ws_max_size=2 * MOST_FRAME_BYTES,
            # Pings are for proxies, which close a silent connection; a client may be slow to answer.
            ws_ping_timeout=None,
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_SECONDS_TO_KEEP_IDLE_CONNECTIONS,
            backlog=BACKLOG,
            timeout_graceful_shutdown=_SECONDS_TO_SEND_LAST_BYTES,
            ssl_certfile=options.ssl_certfile,
            ssl_keyfile=options.ssl_keyfile,
            ssl_ca_certs=options.ssl_ca_certs,
            ssl_cert_reqs=ssl.CERT_NONE if options.ssl_ca_certs is None else ssl.CERT_REQUIRED,
        )
    )


class _Life:
    """One run of the server."""

    def __init__(
        self,
        listener: socket.socket,
        engine: "AsyncEngine",
        options: ServeConfig,
        shared: tuple[Limits, ResponseStore | None],
        index: int,
        report: Callable[[HttpMessage], None],
        started: int | None,
        at_once: bool,
        traces: "Traces | None",
    ) -> None:
        self._level = logging.DEBUG if index else logging.INFO
        """Of what would be the same from every HTTP process."""
        self._report = report
        self._serving: asyncio.Task[None] | None = None
        self._at_once = at_once
        app = create_app(engine, options, report, *shared, traces)
        self._engine = engine
        self._state: ServerState = app.state.server
        if started is not None:
            self._state.created = started
        self._listener = listener
        self._scheme = options.scheme
        self._timeout = options.shutdown_timeout
        self._traces = traces
        self._deadline = 0.0
        """Of the event loop's clock: when a shutdown should be over."""
        self._throughput = Throughput()
        self._asked_to_stop = asyncio.Event()
        self._asked_again = asyncio.Event()
        self._http = http_server(app, options)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        if self._at_once:
            self._accept()
        reporting = asyncio.create_task(self._report_throughput())
        try:
            return await self._until_stop()
        finally:
            self._state.draining = True
            if self._state.frames:
                # The HTTP server closes a WebSocket at once, whatever is still to be sent on it.
                await asyncio.wait(self._state.frames, timeout=_SECONDS_TO_SEND_LAST_BYTES)
            self._http.should_exit = True
            reporting.cancel()
            if self._serving is not None:
                await self._serving
            await self._engine.shutdown()
            if self._traces is not None:
                await self._traces.close(self._deadline - loop.time(), self._asked_again)

    def _accept(self) -> None:
        self._serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))

    async def _until_stop(self) -> int:
        if not await self._first_of(self._engine.ready()):
            return STOPPED
        if self._serving is None:
            self._accept()
        freeze_start()
        self._report(HttpReady())
        logger.log(
            self._level,
            "ready on %s: %s, at most %d tokens a request",
            url(self._listener, self._scheme),
            ", ".join(self._state.names),
            self._state.max_model_len,
        )
        if not await self._first_of(self._engine_end()):
            await self._drain()
        if self._engine.error is None:
            return STOPPED
        logger.error("ending with exit status %d: %s", ENGINE_DIED, self._engine.error)
        return ENGINE_DIED

    async def _first_of(self, work: Coroutine[Any, Any, object]) -> bool:
        """Wait for `work` or a signal; return whether it was `work`, and raise what that raised."""
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self._asked_to_stop.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        if self._asked_to_stop.is_set():
            task.cancel()
            return False
        stop.cancel()
        task.result()
        return True

    async def _engine_end(self) -> None:
        while self._engine.error is None:
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)

    async def _drain(self) -> None:
        """Let running requests finish while there is time, then abort the rest; a second signal hurries."""
        self._state.draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout
        running = self._state.streams
        logger.info("draining: %d requests have up to %g s to finish", len(running), self._timeout)
        while running and self._engine.error is None and not self._asked_again.is_set():
            if loop.time() >= deadline:
                break
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
        if self._engine.error is not None:
            return
        if running:
            logger.info("drain over: aborting %d requests that have not finished", len(running))
        else:
            logger.info("drain over: every request has finished")
        for stream in list(running):
            self._engine.interrupt(stream, RequestAbortedError("the server is shutting down"))

    async def _report_throughput(self) -> None:
        while True:
            await asyncio.sleep(_SECONDS_BETWEEN_REPORTS)
            line = self._throughput.line(self._engine.stats, _SECONDS_BETWEEN_REPORTS)
            if line is not None:
                logger.log(self._level, "%s", line)

    def _on_signal(self, number: signal.Signals) -> None:
        logger.log(self._level, "%s received", number.name)
        if self._asked_to_stop.is_set():
            self._asked_again.set()
        else:
            self._deadline = asyncio.get_running_loop().time() + self._timeout
        self._asked_to_stop.set()


class Throughput:
    """Describes the engine's work since the last time, from its counters."""

    def __init__(self) -> None:
        self._last: EngineStats | None = None

    def line(self, stats: "EngineStats", seconds: float) -> str | None:
        """Return a line for the log, None if nothing runs and nothing ran in the `seconds` since."""
        last, self._last = self._last, stats
        prompt, generated, queries, hits = (
            getattr(stats, name) - (0 if last is None else getattr(last, name))
            for name in ("prompt_tokens", "generation_tokens", "prefix_queries", "prefix_hits")
        )
        if not (prompt or generated or stats.running or stats.waiting):
            return None
        return (
            f"prompt {prompt / seconds:.1f} tokens/s, generation {generated / seconds:.1f} tokens/s, "
            f"running {stats.running}, waiting {stats.waiting}, KV cache {stats.kv_cache_usage:.1%}, "
            f"prefix cache hits {hits / queries if queries else 0:.1%}"
        )


def _allow_open_files() -> None:
    """Raise the soft limit of open files: each client holds one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
