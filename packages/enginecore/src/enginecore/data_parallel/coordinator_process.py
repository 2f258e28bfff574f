"""The coordinator in a process of its own, behind ZMQ sockets.

Started as `python -P -m enginecore.data_parallel.coordinator_process` with its settings on standard input; it
ends when that pipe closes. It reports `CoordinatorPorts` or `Failed` as a line of JSON on standard output.
"""

import json
import logging
import math
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import BinaryIO

import msgspec
import zmq

from enginecore import logs
from enginecore.codec import Decoder, Encoder
from enginecore.data_parallel.connection import Gate, prepare
from enginecore.data_parallel.coordinator import Coordinator
from enginecore.data_parallel.link import ask_status
from enginecore.data_parallel.messages import CoordinatorAddress, ToCoordinator
from enginecore.errors import ConfigError
from enginecore.messages import Failed
from enginecore.parent import end_with_parent, private_stdout

logger = logging.getLogger(__name__)

_MESSAGES_AT_ONCE = 1000
"""Most messages that are taken before a snapshot that is due is sent."""


class CoordinatorSettings(msgspec.Struct):
    """Settings of the process: one line of JSON on its standard input."""

    address: CoordinatorAddress
    """Endpoints to bind; `ipc://…`, `tcp://host:port`, or `tcp://host:*` for any free port."""
    http_host: str = "127.0.0.1"
    http_port: int | None = None
    """Where GET /status answers with JSON; 0: any free port, None: nowhere."""
    log: logs.LogSettings = logs.LogSettings()


class CoordinatorPorts(msgspec.Struct, tag="ports"):
    """Where a coordinator is reached."""

    address: CoordinatorAddress
    http: str | None = None
    """URL of the status."""


class CoordinatorServer:
    """Binds the sockets of a coordinator, and serves them."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        """Bind.

        Raises:
            ConfigError: an address is taken or not one of this host.
        """
        key = settings.address.key
        self._context = zmq.Context()
        self._gate = None if key is None else Gate(self._context, key)
        self._reports = self._context.socket(zmq.ROUTER)
        # No limit: libzmq (4.3.5) aborts when a peer goes whose input waits for room. Ranks limit their rate.
        self._reports.setsockopt(zmq.RCVHWM, 0)
        self._snapshots = self._context.socket(zmq.PUB)
        # A front-end that does not read misses snapshots; it reads the newest in any case.
        self._snapshots.setsockopt(zmq.SNDHWM, 2)
        reports = _bind(self._reports, settings.address.reports, key)
        snapshots = _bind(self._snapshots, settings.address.snapshots, key)
        address = CoordinatorAddress(reports, snapshots, key)
        http = None
        if settings.http_port is not None:
            http = _serve_status(settings.http_host, settings.http_port, address)
        self.ports = CoordinatorPorts(address, http)
        self._coordinator = Coordinator(time.monotonic())
        self._decoder: Decoder[ToCoordinator] = Decoder(ToCoordinator)
        self._encoder = Encoder()

    def run(self) -> None:
        """Serve until the process ends."""
        poller = zmq.Poller()
        poller.register(self._reports, zmq.POLLIN)
        if self._gate is not None:
            poller.register(self._gate.socket, zmq.POLLIN)
        while True:
            wait = max(self._coordinator.wait(time.monotonic()), 0)
            ready = dict(poller.poll(math.ceil(1000 * wait)))
            if self._gate is not None and self._gate.socket in ready:
                self._gate.answer()
            if self._reports in ready:
                self._read()
            snapshot = self._coordinator.snapshot(time.monotonic())
            if snapshot is not None:
                self._snapshots.send(self._encoder.encode(snapshot))

    def _read(self) -> None:
        for _ in range(_MESSAGES_AT_ONCE):
            try:
                sender, *parts = self._reports.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decoder.decode(b"".join(parts))
            except (msgspec.DecodeError, ValueError) as error:
                logger.warning("a message that cannot be read was dropped: %s", error)
                continue
            for send in self._coordinator.receive(sender, message, time.monotonic()):
                self._reports.send_multipart([send.to, self._encoder.encode(send.message)])


def main() -> int:
    """Run until the parent goes away; return 2 if an address cannot be bound."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    output = private_stdout()
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    settings = msgspec.json.decode(line, type=CoordinatorSettings)
    logs.configure(settings.log)
    end_with_parent()
    try:
        server = CoordinatorServer(settings)
    except ConfigError as error:
        _report(output, Failed(str(error)))
        return 2
    _report(output, server.ports)
    server.run()
    return 0


def _report(output: BinaryIO, message: CoordinatorPorts | Failed) -> None:
    output.write(msgspec.json.encode(message) + b"\n")
    output.flush()


def _bind(socket: zmq.Socket, endpoint: str, key: str | None) -> str:
    """Bind a socket and return its real endpoint."""
    prepare(socket, key, server=True, ipv6="[" in endpoint)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"the coordinator cannot listen on {endpoint}: {error.strerror}") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _serve_status(host: str, port: int, address: CoordinatorAddress) -> str:
    """Answer GET /status from a thread, which asks the coordinator as anybody would; return the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/status":
                self._answer(404, {"error": "the status is at /status"})
                return
            status = ask_status(address)
            if status is None:
                self._answer(503, {"error": "the coordinator does not answer"})
            else:
                self._answer(200, msgspec.to_builtins(status))

        def log_message(self, format: str, *arguments: object) -> None:
            logger.debug("%s %s", self.address_string(), format % arguments)

        def _answer(self, code: int, body: object) -> None:
            data = json.dumps(body).encode() + b"\n"
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise ConfigError(f"the status cannot be served on {host}, port {port}: {error.strerror}") from error
    threading.Thread(target=server.serve_forever, daemon=True, name="status").start()
    return f"http://{host}:{server.server_address[1]}/status"


if __name__ == "__main__":
    sys.exit(main())
