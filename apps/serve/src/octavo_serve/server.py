"""The server's life: accept at once, load the model, serve, drain, end."""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop

from enginecore.errors import RequestAbortedError
from octavo_serve.app import create_app
from octavo_serve.config import ServeConfig
from octavo_serve.listening import BACKLOG, url
from octavo_serve.state import ServerState

if TYPE_CHECKING:
    from enginecore import AsyncEngine

STOPPED = 0
ENGINE_DIED = 1

_SECONDS_TO_SEND_LAST_BYTES = 3
_SECONDS_TO_KEEP_IDLE_CONNECTIONS = 75
_SECONDS_BETWEEN_LOOKS = 0.1
_OPEN_FILES = 65536

logger = logging.getLogger(__name__)


def run(listener: socket.socket, make_engine: Callable[[], "AsyncEngine"], options: ServeConfig) -> int:
    """Serve on `listener` until a signal asks to stop or the engine dies; return the exit status.

    Raises:
        OctavoError: the engine could not start.
    """
    logging.basicConfig(level=options.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    # At its own info level the HTTP server reports what this module reports better.
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.getLogger().level))
    _allow_open_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Life(listener, make_engine(), options).run())


class _Listener(uvicorn.Server):
    """uvicorn without its own signal handling, which would end the process by the signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class _Life:
    """One run of the server."""

    def __init__(self, listener: socket.socket, engine: "AsyncEngine", options: ServeConfig) -> None:
        app = create_app(engine, options)
        self._engine = engine
        self._state: ServerState = app.state.server
        self._listener = listener
        self._timeout = options.shutdown_timeout
        self._asked_to_stop = asyncio.Event()
        self._asked_again = asyncio.Event()
        self._http = _Listener(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=options.log_level == "debug",
                server_header=False,
                timeout_keep_alive=_SECONDS_TO_KEEP_IDLE_CONNECTIONS,
                backlog=BACKLOG,
                timeout_graceful_shutdown=_SECONDS_TO_SEND_LAST_BYTES,
            )
        )

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        logger.info("listening on %s, loading %s", url(self._listener), self._engine.config.model)
        try:
            return await self._until_stop()
        finally:
            self._state.draining = True
            self._http.should_exit = True
            await serving
            await self._engine.shutdown()

    async def _until_stop(self) -> int:
        if not await self._first_of(self._engine.ready()):
            return STOPPED
        logger.info("ready on %s", url(self._listener))
        if await self._first_of(self._engine_end()):
            return ENGINE_DIED
        await self._drain()
        return STOPPED

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
        while running and loop.time() < deadline and not self._asked_again.is_set():
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
        if running:
            logger.info("aborting %d running requests", len(running))
        for stream in list(running):
            self._engine.interrupt(stream, RequestAbortedError("the server is shutting down"))

    def _on_signal(self) -> None:
        if self._asked_to_stop.is_set():
            self._asked_again.set()
        self._asked_to_stop.set()


def _allow_open_files() -> None:
    """Raise the soft limit of open files: each client holds one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
