"""A connection between the core and a worker that it has no pipe to: on another host, or started by others.

Two ZMQ sockets over TCP: steps go one way, messages the other. The core makes a CURVE key for each link and
tells it to the worker alone; it never crosses the network in clear, and who does not know it cannot connect.
Each end sees at once when the other's process ends, and in some seconds when its host falls silent.
"""

import contextlib
import os
import select
import struct
import threading
import time
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from enginecore.errors import OctavoError
from enginecore.executor.wire import (
    Failure,
    LinkSettings,
    WorkerMessage,
    WorkerSettings,
    decode_message,
    encode_message,
)

_HEARTBEAT_MS = 400
_SILENCE_MS = 1600
"""A host that has not answered a heartbeat for so long is gone."""
_TO_BE_HEARD = 2.0
"""Seconds that a worker which failed waits for the core to hear of it."""
_STAMP = struct.Struct("<q")
"""Before each message: when it was sent, in nanoseconds of the worker's monotonic clock."""
_FAILED = (
    zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
)
_EVENTS = (
    _FAILED | zmq.Event.ACCEPTED | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.CLOSED
)


class LinkError(OctavoError):
    """The other end cannot be reached, or takes nothing."""


class CoreEnd:
    """The core's end of a link to one worker. One thread at a time."""

    def __init__(self, host: str, timeout: float) -> None:
        """Listen on `host`, an address of this host that the worker's host can reach.

        `timeout` is how many seconds `write` waits at most. Raises LinkError when nothing can listen there.
        """
        public, secret = zmq.curve_keypair()
        self._timeout = timeout
        self._steps = _socket(zmq.PUSH, host)
        self._messages = _socket(zmq.PULL, host)
        for socket in (self._steps, self._messages):
            socket.curve_server = True
            socket.curve_secretkey = secret
        self._steps.sndtimeo = round(1000 * timeout)
        self._monitor = _watch(self._messages)
        place = f"[{host}]" if ":" in host else host
        try:
            for socket in (self._steps, self._messages):
                socket.bind(f"tcp://{place}:*")
        except zmq.ZMQError as error:
            self.close()
            raise LinkError(f"the core cannot listen on {host}: {error}") from error
        self.settings = LinkSettings(*map(_address, (self._steps, self._messages)), public.decode())
        self._readable = select.epoll()
        for socket in (self._messages, self._monitor):
            self._readable.register(socket.fileno(), select.EPOLLIN)
        self._coming: set[int] = set()
        """Descriptors of connections that have not shown the key yet."""
        self._ours: set[int] = set()
        """The worker's, and those that were coming with it."""
        self._refused = False
        """Whether a handshake has failed: then the next event is that connection's end."""
        self._clocks = 1 << 62
        self.connected = False
        """Whether `receive` has seen the worker come."""
        self.ended = False
        """Whether `receive` has seen the connection end."""

    def fileno(self) -> int:
        """A descriptor that is readable when there is something to receive, also the end."""
        return self._readable.fileno()

    def receive(self) -> list[WorkerMessage]:
        """Return what the worker has said since the last call, without waiting."""
        # First: what was said before the end is in the queue by the time that the end is told.
        self._look()
        said = []
        # A ZMQ descriptor tells only of what is new, so all that there is must be taken.
        with contextlib.suppress(zmq.Again):
            while True:
                said.append(self._decode(self._messages.recv(zmq.NOBLOCK)))
        return said

    def write(self, step: bytes) -> None:
        """Send a step; LinkError when the worker takes none for the timeout."""
        try:
            self._steps.send(step)
        except zmq.Again as error:
            raise LinkError(f"nobody takes steps at {self.settings.steps} for {self._timeout:g} s") from error

    def close(self) -> None:
        """Drop the connection, whereupon the worker ends itself."""
        _close([self._steps, self._messages], [self._monitor])

    def _look(self) -> None:
        """Take in what became of connections, of which any but the worker's are strangers'."""
        with contextlib.suppress(zmq.Again):
            while True:
                told = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                event, descriptor = told["event"], told["value"]
                if event == zmq.Event.ACCEPTED:
                    self._coming.add(descriptor)
                elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
                    self.connected = True
                    self._ours, self._coming = self._coming, set()
                elif event == zmq.Event.DISCONNECTED:
                    if self._refused:
                        self._ours.discard(descriptor)
                    self.ended |= descriptor in self._ours
                    self._coming.discard(descriptor)
                self._refused = bool(event & _FAILED)

    def _decode(self, frame: bytes) -> WorkerMessage:
        """Return a message; a failure's time becomes that of this host's clock."""
        (sent,) = _STAMP.unpack_from(frame)
        # The clocks' difference and the time on the way, of which the least that was seen says most.
        self._clocks = min(self._clocks, time.monotonic_ns() - sent)
        message = decode_message(memoryview(frame)[_STAMP.size :])
        if isinstance(message, Failure):
            message.at += self._clocks
        return message


class WorkerEnd:
    """A worker's end of a link to its core."""

    def __init__(self, settings: LinkSettings, timeout: float) -> None:
        """Connect. From then on this process ends when the core does, or is not heard of any more.

        Raises LinkError when the core cannot be reached within `timeout` seconds.
        """
        until = time.monotonic() + timeout
        public, secret = zmq.curve_keypair()
        self._steps = _socket(zmq.PULL, settings.steps)
        self._messages = _socket(zmq.PUSH, settings.messages)
        self._lock = threading.Lock()
        monitors: list[zmq.Socket] = []
        for socket, address in ((self._steps, settings.steps), (self._messages, settings.messages)):
            socket.curve_serverkey = settings.key.encode()
            socket.curve_publickey, socket.curve_secretkey = public, secret
            socket.reconnect_ivl = -1
            # Only the second connection is watched: both lead to one process.
            watched = socket is self._messages
            monitors.append(_watch(socket) if watched else socket.get_monitor_socket(_EVENTS))
            socket.connect(address)
            if failed := _await_handshake(monitors[-1], until):
                _close([self._steps, self._messages], monitors)
                raise LinkError(f"cannot reach the core at {address} within {timeout:g} s: {failed}")
        threading.Thread(target=_end_with_core, args=(monitors[-1],), daemon=True, name="core-watch").start()

    def read(self) -> bytes:
        """Wait for the next step and return it."""
        return self._steps.recv()

    def send(self, message: WorkerMessage) -> None:
        """Say something to the core; from any thread."""
        body = encode_message(message)
        with self._lock:
            self._messages.send(_STAMP.pack(time.monotonic_ns()) + body)

    def await_end(self, timeout: float) -> None:
        """Leave it to the core to end this process, as it does when it has heard of a failure."""
        threading.Event().wait(timeout)


def serve_link(settings: WorkerSettings) -> int:
    """Serve a core over the link that `settings` name; return an exit status.

    Raises LinkError when the core cannot be reached.
    """
    assert settings.link is not None
    link = WorkerEnd(settings.link, settings.config.distributed_timeout_seconds)
    from enginecore.worker.loop import serve

    status = serve(settings, link.send, link.read if settings.steps is None else None)
    link.await_end(_TO_BE_HEARD)
    return status


def _socket(kind: int, address: str) -> zmq.Socket:
    socket = zmq.Context.instance().socket(kind)
    socket.ipv6 = "[" in address or (":" in address and "://" not in address)
    socket.linger = 0
    return socket


def _watch(socket: zmq.Socket) -> zmq.Socket:
    """Have the other end's host asked whether it is there; return what tells of the connection."""
    socket.heartbeat_ivl = _HEARTBEAT_MS
    socket.heartbeat_timeout = _SILENCE_MS
    return socket.get_monitor_socket(_EVENTS)


def _close(sockets: Sequence[zmq.Socket], monitors: Sequence[zmq.Socket]) -> None:
    """Close sockets, and then what tells of them: ZMQ's thread would wait for ever to tell nobody."""
    for socket in sockets:
        if not socket.closed:
            socket.disable_monitor()
            socket.close()
    for monitor in monitors:
        monitor.close()


def _address(socket: zmq.Socket) -> str:
    return socket.get_string(zmq.LAST_ENDPOINT)


def _await_handshake(monitor: zmq.Socket, until: float) -> str:
    """Return what is wrong, or nothing once the other end has proved that it has the key."""
    while monitor.poll(max(0, round(1000 * (until - time.monotonic())))):
        event = recv_monitor_message(monitor)["event"]
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            return ""
        if event & _FAILED:
            return "whoever listens there is not the core"
        if event in (zmq.Event.CLOSED, zmq.Event.DISCONNECTED):
            return "the connection was refused"
    return "no answer"


def _end_with_core(monitor: zmq.Socket) -> None:
    while recv_monitor_message(monitor)["event"] != zmq.Event.DISCONNECTED:
        pass
    os._exit(0)
