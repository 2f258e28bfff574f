"""The engine core in a process of its own, behind a ZMQ socket.

Started as `python -m enginecore.core.process` with its settings on standard input; who started it keeps that
pipe open, and when it closes, because that ended in whatever way, so does this process. It reports `Ready` or
`Failed` as a line of JSON on standard output, and `Failed` as another if later it ends.
"""

from __future__ import annotations

import logging
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from enginecore import logs
from enginecore.codec import Decoder, Encoder
from enginecore.config import EngineConfig
from enginecore.core.board import Board
from enginecore.core.identity import frontend_identity, frontend_number
from enginecore.core.settings import CoreSettings
from enginecore.errors import EngineDeadError, OctavoError
from enginecore.messages import (
    AbortRequests,
    AddRequest,
    CoreMessage,
    Failed,
    FrontendMessage,
    Outputs,
    Ready,
    ResetPrefixCache,
)
from enginecore.model_files import locate
from enginecore.parent import end_with_parent, private_stdout

if TYPE_CHECKING:
    from enginecore.core.engine_core import EngineCore

logger = logging.getLogger(__name__)

_MS_BETWEEN_BEATS = 500
"""Longest time in which an idle core's loop does not go round."""
_SECONDS_TO_SEND = 1
"""What front-ends have not taken by then of the last messages is dropped."""


class CoreServer:
    """Reads front-end messages, steps the core, sends each front-end its outputs."""

    def __init__(self, core: EngineCore, socket: zmq.Socket, board: Board) -> None:
        """`socket` is a ROUTER that refuses to send to who is not connected (ZMQ_ROUTER_MANDATORY)."""
        self._core = core
        self._socket = socket
        self._board = board
        self._decoder: Decoder[FrontendMessage] = Decoder(FrontendMessage)
        self._encoder = Encoder()
        self._clients: set[int] = set()
        self._ends = socket.get_monitor_socket(zmq.Event.DISCONNECTED)
        """Has a message for each connection that has ended."""

    def run(self) -> NoReturn:
        """Serve until the core fails.

        Raises:
            EngineDeadError: a step failed, or a worker has ended.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._ends, zmq.POLLIN)
        for descriptor in self._core.descriptors:
            poller.register(descriptor, zmq.POLLIN)
        while True:
            self._board.beat()
            if not self._core.has_work:
                self._board.publish(self._core.stats())
                poller.poll(_MS_BETWEEN_BEATS)
                self._core.check_workers()
            self._read()
            self._forget_gone()
            if self._core.has_work:
                self._step()

    def close(self) -> None:
        """Close the socket, once what has been sent is taken."""
        self._socket.disable_monitor()
        self._socket.close(linger=1000 * _SECONDS_TO_SEND)

    def _step(self) -> None:
        outputs = self._core.step()
        self._board.publish(self._core.stats())
        for client, mine in outputs.items():
            self._send(client, mine)

    def _read(self) -> None:
        while self._socket.poll(0):
            identity, body = self._socket.recv_multipart()
            client = frontend_number(identity)
            self._clients.add(client)
            self._handle(client, self._decoder.decode(body))

    def _handle(self, client: int, message: FrontendMessage) -> None:
        match message:
            case AddRequest():
                self._core.add(client, message)
            case AbortRequests(numbers=numbers):
                self._core.abort(client, numbers)
            case ResetPrefixCache():
                self._core.reset_prefix_cache()

    def _forget_gone(self) -> None:
        """Drop the requests of front-ends whose connection has ended."""
        if not self._ends.poll(0):
            return
        while self._ends.poll(0):
            recv_monitor_message(self._ends)
        # The event does not say whose connection it was: an empty message finds that out.
        for client in list(self._clients):
            self._send(client, Outputs.empty())

    def _send(self, client: int, message: CoreMessage) -> None:
        try:
            self._socket.send_multipart([frontend_identity(client), self._encoder.encode(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._clients.discard(client)
            self._core.forget(client)


def main() -> int:
    """Run until who started it goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = private_stdout()
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    settings = msgspec.json.decode(line, type=CoreSettings)
    logs.configure(settings.log)
    # A parent that was killed leaves its folder behind.
    folder = Path(settings.address.removeprefix("ipc://")).parent
    end_with_parent(lambda: shutil.rmtree(folder, ignore_errors=True))
    board = Board(Path(settings.board))
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.bind(settings.address)
    try:
        core = _start(settings.config, board)
    except (OctavoError, MemoryError) as error:
        _report(status, Failed(f"{error}" or type(error).__name__))
        return 2
    except Exception as error:
        logger.exception("the engine could not start")
        _report(status, Failed(f"the engine could not start: {type(error).__name__}: {error}"))
        return 1
    _report(status, Ready(core.limits, core.local_pids))
    server = CoreServer(core, socket, board)
    try:
        server.run()
    except Exception as error:
        if not isinstance(error, EngineDeadError):
            logger.exception("the engine has ended")
            error = EngineDeadError(f"the engine has ended: {type(error).__name__}: {error}")
        _report(status, Failed(str(error)))
        server.close()
        return 3


def _start(config: EngineConfig, board: Board) -> EngineCore:
    # Only now what takes seconds to import: the front-end may end meanwhile.
    from enginecore.core.engine_core import start_core

    return start_core(config, locate(config.model, config.revision, config.hf_overrides), board=board)


def _report(status: BinaryIO, message: Ready | Failed) -> None:
    status.write(msgspec.json.encode(message) + b"\n")
    status.flush()


if __name__ == "__main__":
    sys.exit(main())
