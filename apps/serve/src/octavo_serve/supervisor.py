"""The server's supervisor: starts HTTP processes and ranks, and starts again what dies. Needs no torch."""

import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from queue import SimpleQueue

import msgspec

from enginecore import (
    EngineConfig,
    RankDown,
    RankEvent,
    RankLoading,
    RankOut,
    RankSupervisor,
    __version__,
    logs,
)
from enginecore.errors import ModelError
from enginecore.threads import user_environment
from octavo_serve.config import ServeConfig
from octavo_serve.limits import make_counts
from octavo_serve.listening import url
from octavo_serve.messages import (
    COUNTS,
    RESPONSES,
    HttpFailed,
    HttpMessage,
    HttpReady,
    HttpSettings,
    ReloadExperts,
)
from octavo_serve.tracing import with_path, without_secrets

STOPPED = 0
ENGINE_DIED = 1

_COMMAND = (sys.executable, "-P", "-m", "octavo_serve.process")
_MOST_DEATHS, _WINDOW = 5, 300.0
"""If HTTP processes die before they are ready more often in so many seconds, the server ends."""

logger = logging.getLogger(__name__)
_message: msgspec.json.Decoder[HttpMessage] = msgspec.json.Decoder(HttpMessage)


def announce(listener: socket.socket, engine: EngineConfig, server: ServeConfig) -> None:
    """Log from now on as `server` says, first of all the beginning."""
    logs.configure(logs.LogSettings(getattr(logging, server.log_level.upper()), server.log_format))
    if server.uds is None and server.host in ("0.0.0.0", "::", "") and not server.keys():
        logger.warning("listening on every network without an API key: anybody there may use this server")
    logger.info("version %s", __version__)
    if server.otlp_traces_endpoint is not None:
        logger.info("tracing requests to %s", without_secrets(with_path(server.otlp_traces_endpoint)))
    logger.info("listening on %s, loading %s", url(listener, server.scheme), engine.model)


class _HttpProcess:
    """A running HTTP process."""

    def __init__(self, settings: HttpSettings, told: "SimpleQueue[_Told]") -> None:
        self.index = settings.index
        self.is_ready = False
        self.failure: str | None = None
        self._process = subprocess.Popen(
            _COMMAND,
            env=user_environment() | {"PROMETHEUS_MULTIPROC_DIR": settings.metrics},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(settings.listener,),
            start_new_session=True,
        )
        self._write(msgspec.json.encode(settings))
        threading.Thread(target=self._watch, args=(told,), daemon=True, name="http-watch").start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, event: RankEvent) -> None:
        """Tell it of a rank."""
        self._write(msgspec.json.encode(event))

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def ending(self) -> int:
        """Wait for its end and return its exit status."""
        return self._process.wait()

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            logger.debug("HTTP process %d has ended before it was told", self.index)

    def _watch(self, told: "SimpleQueue[_Told]") -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            match _message.decode(line):
                case HttpFailed(message=message):
                    self.failure = message
                case HttpReady():
                    self.is_ready = True
                    told.put(HttpReady())
                case ReloadExperts() as wish:
                    told.put(wish)
        self._process.wait()
        told.put(self)


_Told = RankEvent | _HttpProcess | HttpReady | ReloadExperts | signal.Signals
"""What happens: news of a rank, the start, end or a wish of an HTTP process, a signal."""


class Supervisor:
    """One run of `octavo-serve`."""

    def __init__(self, listener: socket.socket, engine: EngineConfig, server: ServeConfig) -> None:
        self._listener = listener
        self._engine = engine
        self._server = server
        self._told: SimpleQueue[_Told] = SimpleQueue()
        self._last: dict[int, RankEvent] = {}
        """The newest change of each rank, for HTTP processes that are started later."""
        self._loading: dict[int, RankLoading] = {}
        """Progress of ranks that start, for them too."""
        self._processes: list[_HttpProcess] = []
        self._number = 0
        self._began = int(time.time())
        self._deaths: deque[float] = deque()
        self._stopping = False
        self._serves = False
        """Whether an HTTP process takes requests, or did: from then on none may answer that it cannot yet."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: self._told.put(signal.Signals(number)))
        self._ranks = RankSupervisor(engine)
        self._metrics = self._ranks.folder / "metrics"
        self._metrics.mkdir(mode=0o700)
        self._num_processes = server.api_server_count or len(engine.local_ranks)
        self._shared = self._ranks.folder / "http"
        self._shared.mkdir(mode=0o700)
        (self._shared / RESPONSES).mkdir()
        make_counts(self._shared / COUNTS, self._num_processes, len(server.keys()))

    def run(self) -> int:
        """Serve until asked to stop, or until no rank can be started any more; return the exit status.

        Raises:
            ModelError: the model could not be loaded, or an HTTP process not be started.
        """
        try:
            for index in range(self._num_processes):
                self._start(index)
            self._ranks.listen(self._told.put)
            return self._serve()
        finally:
            for process in self._processes:
                process.signal(signal.SIGKILL)
            self._ranks.stop()
            if self._server.uds is not None:
                Path(self._server.uds).unlink(missing_ok=True)

    def _serve(self) -> int:
        while True:
            told = self._told.get()
            if isinstance(told, ReloadExperts):
                self._ranks.reload_experts()
            elif isinstance(told, HttpReady):
                self._on_http_ready()
            elif isinstance(told, signal.Signals):
                self._stopping = True
                for process in self._processes:
                    process.signal(signal.SIGTERM)
            elif isinstance(told, _HttpProcess):
                status = self._on_http_end(told)
                if status is not None:
                    return status
            else:
                self._on_rank(told)

    def _on_rank(self, event: RankEvent) -> None:
        if isinstance(event, RankLoading):
            self._loading[event.rank] = event
        else:
            self._loading.pop(event.rank, None)
            # Suspects concern the front-ends of that moment only.
            kept = msgspec.structs.replace(event, suspects=[]) if isinstance(event, RankDown) else event
            self._last[event.rank] = kept
        for process in self._processes:
            if self._serves or process.index == 0:
                process.tell(event)

    def _on_http_ready(self) -> None:
        """Let the others serve too once the first does, which has refused requests until then."""
        if self._serves:
            return
        self._serves = True
        for process in self._processes:
            if process.index:
                self._tell_all(process)

    def _tell_all(self, process: _HttpProcess) -> None:
        for event in (*self._last.values(), *self._loading.values()):
            process.tell(event)

    def _on_http_end(self, process: _HttpProcess) -> int | None:
        """Start an HTTP process again that has died; return the exit status if the server is to end."""
        self._processes.remove(process)
        status = process.ending()
        if process.failure is not None:
            raise ModelError(process.failure)
        if self._stopping:
            if self._processes:
                return None
            logger.info("stopped")
            return STOPPED
        if self._all_out:
            # The others still tell their clients.
            return None if self._processes else ENGINE_DIED
        how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        logger.error("HTTP process %d has ended (%s)", process.index, how)
        self._forget_counts(process.pid)
        now = time.monotonic()
        if not process.is_ready:
            self._deaths.append(now)
        while self._deaths and self._deaths[0] < now - _WINDOW:
            self._deaths.popleft()
        if len(self._deaths) > _MOST_DEATHS:
            logger.error("%d HTTP processes have died before they were ready: ending", len(self._deaths))
            return ENGINE_DIED
        self._start(process.index)
        return None

    @property
    def _all_out(self) -> bool:
        return len(self._last) == len(self._ranks.boards) and all(
            isinstance(event, RankOut) for event in self._last.values()
        )

    def _start(self, index: int) -> None:
        settings = HttpSettings(
            engine=self._engine,
            server=self._server,
            listener=self._listener.fileno(),
            index=index,
            number=self._number,
            boards={rank: str(path) for rank, path in self._ranks.boards.items()},
            coordinator=self._ranks.coordinator,
            shared=str(self._shared),
            metrics=str(self._metrics),
            started=self._began,
            at_once=index == 0 and not self._serves,
            log=logs.current(),
        )
        self._number += 1
        process = _HttpProcess(settings, self._told)
        self._processes.append(process)
        if self._serves or index == 0:
            self._tell_all(process)

    def _forget_counts(self, pid: int) -> None:
        """Forget what a process that has died had going on; what it has counted stays."""
        for path in self._metrics.glob(f"gauge_live*_{pid}.db"):
            path.unlink()
