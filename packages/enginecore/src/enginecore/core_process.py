"""The engine core in a process of its own, behind a ZMQ socket.

Started as `python -m enginecore.core_process` with its settings on standard input; the front-end keeps that
pipe open, and when it closes, because the front-end ended in whatever way, so does this process. It reports
`Ready` or `Failed` as one line of JSON on standard output.
"""

import logging
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec
import zmq

from enginecore.config import EngineConfig
from enginecore.core import EngineCore
from enginecore.errors import OctavoError
from enginecore.executor.inproc import InprocExecutor
from enginecore.messages import (
    AbortRequests,
    AddRequest,
    CoreMessage,
    Failed,
    FrontendMessage,
    Hello,
    ResetPrefixCache,
)
from enginecore.model_files import locate

logger = logging.getLogger(__name__)


class CoreSettings(msgspec.Struct):
    """What the process is told on standard input, as one line of JSON."""

    config: EngineConfig
    address: str
    """ZMQ endpoint to bind."""


class CoreServer:
    """Reads front-end messages, steps the core, sends each front-end its outputs."""

    def __init__(self, core: EngineCore, socket: zmq.Socket) -> None:
        self._core = core
        self._socket = socket
        self._decoder = msgspec.msgpack.Decoder(FrontendMessage)
        self._encoder = msgspec.msgpack.Encoder()
        self._client_of: dict[bytes, int] = {}
        self._identity_of: dict[int, bytes] = {}

    def run(self) -> None:
        """Serve for ever."""
        while True:
            self._read(wait=not self._core.has_work)
            if self._core.has_work:
                for client, outputs in self._core.step().items():
                    self._send(self._identity_of[client], outputs)

    def _read(self, *, wait: bool) -> None:
        while self._socket.poll(None if wait else 0):
            identity, body = self._socket.recv_multipart()
            self._handle(identity, self._decoder.decode(body))
            wait = False

    def _handle(self, identity: bytes, message: FrontendMessage) -> None:
        client = self._client_of.setdefault(identity, len(self._client_of))
        self._identity_of[client] = identity
        match message:
            case AddRequest():
                self._core.add(client, message)
            case AbortRequests(numbers=numbers):
                self._core.abort(client, numbers)
            case ResetPrefixCache():
                self._core.reset_prefix_cache()
            case Hello():
                self._send(identity, self._core.ready)

    def _send(self, identity: bytes, message: CoreMessage) -> None:
        self._socket.send_multipart([identity, self._encoder.encode(message)])


def main() -> int:
    """Run until the front-end goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = _private_stdout()
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=CoreSettings)
    threading.Thread(target=_end_with_parent, args=(settings.address,), daemon=True).start()
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(settings.address)
    try:
        core = EngineCore(
            settings.config,
            InprocExecutor(settings.config, locate(settings.config.model, settings.config.revision)),
        )
    except (OctavoError, MemoryError) as error:
        _report(status, Failed(f"{error}" or type(error).__name__))
        return 2
    except Exception as error:
        logger.exception("the engine could not start")
        _report(status, Failed(f"the engine could not start: {type(error).__name__}: {error}"))
        return 1
    _report(status, core.ready)
    CoreServer(core, socket).run()
    return 0


def _private_stdout() -> BinaryIO:
    """Keep standard output for the status line, and let everything else that prints go to standard error."""
    status = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return status


def _report(status: BinaryIO, message: CoreMessage) -> None:
    status.write(msgspec.json.encode(message) + b"\n")
    status.flush()


def _end_with_parent(address: str) -> None:
    # Reading returns only when every writer of the pipe is gone.
    while sys.stdin.buffer.read(4096):
        pass
    # A parent that was killed leaves its folder behind.
    shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
