"""The link between the core and one worker: settings and steps go down it, messages come up.

It is two ZMQ sockets, one for each direction, since a worker sends from one thread while another waits for
steps. On one host they are Unix sockets in a private folder, which goes once the worker has connected; where
the worker may be on another host, they are TCP sockets with a CURVE key that the core makes for the link and
tells to that worker alone. Each end notices at once when the other's process ends, and over TCP in some
seconds when its host falls silent.
"""

import contextlib
import os
import select
import shutil
import struct
import threading
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NoReturn

import zmq
from zmq.utils.monitor import recv_monitor_message

from enginecore.errors import OctavoError
from enginecore.executor.messages import (
    Failure,
    LinkSettings,
    WorkerMessage,
    decode_message,
    encode_message,
)
from enginecore.private_folder import private_folder

_HEARTBEAT_MS = 400
_SILENCE_MS = 1600
"""A host that has not answered a heartbeat for so long is gone."""
_TO_BE_HEARD = 2.0
"""Seconds that a worker which failed waits for the core to drop the link."""
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

    def __init__(self, host: str | None, timeout: float) -> None:
        """Listen on `host`, an address of this host that the worker can reach; None: for this host only.

        `timeout` is how many seconds the worker has to connect, and `send` waits at most. Raises LinkError
        when nothing can listen on `host`.
        """
        self._timeout = timeout
        self._down, self._up = sockets = _socket(zmq.PUSH, host or ""), _socket(zmq.PULL, host or "")
        self._down.sndtimeo = round(1000 * timeout)
        self._folder: Path | None = None
        key: str | None = None
        if host is None:
            self._folder = private_folder()
            endpoints = [f"ipc://{self._folder}/{name}" for name in ("down", "up")]
        else:
            public, secret = zmq.curve_keypair()
            key = public.decode()
            for socket in sockets:
                socket.curve_server, socket.curve_secretkey = True, secret
            endpoints = ["tcp://" + (f"[{host}]:*" if ":" in host else f"{host}:*")] * 2
        self._monitor = _monitor(self._up, heartbeats=host is not None)
        try:
            for socket, endpoint in zip(sockets, endpoints, strict=True):
                socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise LinkError(f"the core cannot listen on {host or self._folder}: {error}") from error
        self.settings = LinkSettings(
            *(socket.get_string(zmq.LAST_ENDPOINT) for socket in sockets), key, timeout
        )
        self._over: int | None = None
        self._readable = select.epoll()
        for socket in (self._up, self._monitor):
            self._readable.register(socket.fileno(), select.EPOLLIN)
        self._coming: set[int] = set()
        """Descriptors of connections that have not finished the handshake."""
        self._ours: set[int] = set()
        """The worker's, and those that were coming with it."""
        self._refused = False
        """Whether a handshake has failed: then the next event is that connection's end."""
        self._clocks = 0 if host is None else 1 << 62
        """Nanoseconds from the worker's clock to this host's, or more."""
        self.connected = False
        """Whether `receive` has seen the worker connect."""
        self.ended = False
        """Whether `receive` has seen the connection end, or the worker end before it connected."""

    def watch(self, over: int) -> None:
        """Note the worker's end also by `over`, a descriptor that is readable once the worker has ended.

        The caller closes it, after this link.
        """
        self._over = over
        self._readable.register(over, select.EPOLLIN)

    def fileno(self) -> int:
        """A descriptor that is readable when there is something to receive, also the end."""
        return self._readable.fileno()

    def receive(self) -> list[WorkerMessage]:
        """Return the worker's messages since the last call, without waiting."""
        # First: messages from before the end are in the queue by the time that the end is told.
        self._read_events()
        messages = []
        # A ZMQ descriptor tells only of what is new, so all that there is must be taken.
        with contextlib.suppress(zmq.Again):
            while True:
                messages.append(self._decode(self._up.recv(zmq.NOBLOCK)))
        return messages

    def send(self, data: bytes) -> None:
        """Send settings or a step; LinkError when the worker takes nothing for the timeout."""
        try:
            self._down.send(data)
        except zmq.Again as error:
            raise LinkError(
                f"nobody receives from {self.settings.down} within {self._timeout:g} s"
            ) from error

    def close(self) -> None:
        """Drop the connection, whereupon the worker ends itself."""
        _close(self._down)
        _close(self._up, self._monitor)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _read_events(self) -> None:
        """Follow the connections, of which any but the worker's are strangers'."""
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
        if self._over is not None and any(fd == self._over for fd, _ in self._readable.poll(0)):
            # With a connection, its end counts: word of the process's end may overtake the last messages.
            self.ended |= not self.connected
            self._readable.unregister(self._over)
            self._over = None

    def _decode(self, frame: bytes) -> WorkerMessage:
        """Return a message; a failure's time becomes that of this host's clock."""
        (sent,) = _STAMP.unpack_from(frame)
        # The difference of the clocks and the time on the way; the smallest seen is the closest.
        self._clocks = min(self._clocks, time.monotonic_ns() - sent)
        message = decode_message(memoryview(frame)[_STAMP.size :])
        if isinstance(message, Failure):
            message.at += self._clocks
        return message


class WorkerEnd:
    """A worker's end of a link to its core."""

    def __init__(self, settings: LinkSettings) -> None:
        """Connect. From then on this process ends when the core does, or is not heard of any more.

        Raises LinkError when the core cannot be reached in time.
        """
        until = time.monotonic() + settings.timeout
        public, secret = zmq.curve_keypair()
        self._down, self._up = _socket(zmq.PULL, settings.down), _socket(zmq.PUSH, settings.up)
        self._lock = threading.Lock()
        monitors = []
        try:
            for socket, address in ((self._down, settings.down), (self._up, settings.up)):
                if settings.key is not None:
                    socket.curve_serverkey = settings.key.encode()
                    socket.curve_publickey, socket.curve_secretkey = public, secret
                socket.reconnect_ivl = -1
                monitors.append(_monitor(socket, heartbeats=settings.key is not None))
                socket.connect(address)
                if failed := _await_handshake(monitors[-1], until):
                    raise LinkError(
                        f"cannot reach the core at {address} within {settings.timeout:g} s: {failed}"
                    )
        except LinkError:
            for socket, monitor in zip_longest((self._down, self._up), monitors):
                _close(socket, monitor)
            raise
        finally:
            # By the worker, so that none is left if the core is killed meanwhile.
            if settings.key is None:
                shutil.rmtree(Path(settings.up.removeprefix("ipc://")).parent, ignore_errors=True)
        threading.Thread(target=_end_with_core, args=(monitors,), daemon=True, name="core-watch").start()

    def receive(self) -> bytes:
        """Wait for settings or the next step and return them."""
        return self._down.recv()

    def send(self, message: WorkerMessage) -> None:
        """Send a message to the core; from any thread."""
        body = encode_message(message)
        with self._lock:
            self._up.send(_STAMP.pack(time.monotonic_ns()) + body)

    def fail(self, error: Exception) -> NoReturn:
        """End this process because of an exception, when the core has read of it and dropped the link."""
        self.send(Failure.of(error))
        time.sleep(_TO_BE_HEARD)
        os._exit(1)


def _socket(kind: int, address: str) -> zmq.Socket:
    socket = zmq.Context.instance().socket(kind)
    socket.ipv6 = "[" in address or (":" in address and "://" not in address)
    socket.linger = 0
    return socket


def _monitor(socket: zmq.Socket, *, heartbeats: bool) -> zmq.Socket:
    """Return a socket that tells of `socket`'s connections, before there are any.

    With `heartbeats` a host that falls silent ends a connection; between processes of one host only their
    ends do, since a process that is stopped for a while is not gone.
    """
    if heartbeats:
        socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _SILENCE_MS
    return socket.get_monitor_socket(_EVENTS)


def _close(socket: zmq.Socket, monitor: zmq.Socket | None = None) -> None:
    """Close a socket, and then its monitor: ZMQ's thread would wait for ever to tell nobody."""
    if not socket.closed:
        socket.disable_monitor()
        socket.close()
    if monitor is not None:
        monitor.close()


def _await_handshake(monitor: zmq.Socket, until: float) -> str:
    """Return an error, or nothing once the other end has proved that it has the key."""
    while monitor.poll(max(0, round(1000 * (until - time.monotonic())))):
        event = recv_monitor_message(monitor)["event"]
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            return ""
        if event & _FAILED:
            return "whoever listens there is not the core"
        if event in (zmq.Event.CLOSED, zmq.Event.DISCONNECTED):
            return "the connection was refused"
    return "no answer"


def _end_with_core(monitors: Sequence[zmq.Socket]) -> None:
    """Wait until one of the connections ends, and end this process."""
    poller = zmq.Poller()
    for monitor in monitors:
        poller.register(monitor, zmq.POLLIN)
    while all(recv_monitor_message(ready)["event"] != zmq.Event.DISCONNECTED for ready, _ in poller.poll()):
        pass
    os._exit(0)
