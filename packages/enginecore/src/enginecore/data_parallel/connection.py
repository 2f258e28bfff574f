"""How processes reach the coordinator: addresses, and the key that all of them share."""

import os
from pathlib import Path

import zmq
from zmq.utils import z85

from enginecore.data_parallel.messages import CoordinatorAddress
from enginecore.errors import ConfigError

_HEARTBEAT_MS = 2000
_HEARTBEAT_TIMEOUT_MS = 6000
_RECONNECT_MS = 100
_LONGEST_RECONNECT_MS = 1000
_KEY_LENGTH = 40


def tcp_address(host_and_port: str, key: str | None) -> CoordinatorAddress:
    """Return the endpoints of a coordinator at `host:port`; its snapshots come from the next port.

    Raises:
        ConfigError: that is not a host and a port.
    """
    host, _, port = host_and_port.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65535:
        raise ConfigError(
            f"a coordinator's address is host:port, with a port below 65535; got {host_and_port!r}"
        )
    return CoordinatorAddress(f"tcp://{host}:{port}", f"tcp://{host}:{int(port) + 1}", key)


def write_key(path: Path) -> None:
    """Write a new key to a file that only its owner can read.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """
    _, secret = zmq.curve_keypair()
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secret + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write the key to {path}: {error.strerror}") from error


def read_key(path: Path) -> str:
    """Return the key in a file that `write_key` wrote.

    Raises:
        ConfigError: the file cannot be read, or holds no key.
    """
    try:
        key = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError as error:
        raise ConfigError(f"cannot read the key in {path}: {error.strerror}") from error
    if len(key) != _KEY_LENGTH or not _is_key(key):
        raise ConfigError(f"{path} holds no key: octavo-coordinator --write-key FILE writes one")
    return key


def prepare(socket: zmq.Socket, key: str | None, *, server: bool = False, ipv6: bool = False) -> None:
    """Set what every socket of this protocol has; call it before it is bound or connected.

    Heartbeats notice a host that is gone. Client and server have the same key pair, so that a server admits
    those with its own public key: see `Gate`.
    """
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS),
        (zmq.RECONNECT_IVL, _RECONNECT_MS),
        (zmq.RECONNECT_IVL_MAX, _LONGEST_RECONNECT_MS),
    ):
        socket.setsockopt(option, value)
    # Of a server's sockets, only those of an IPv6 address: others would show IPv4 as mapped to it.
    socket.ipv6 = not server or ipv6
    if key is None:
        return
    secret = key.encode()
    public = zmq.curve_public(secret)
    socket.curve_secretkey = secret
    socket.curve_publickey = public
    if server:
        socket.curve_server = True
    else:
        socket.curve_serverkey = public


class Gate:
    """Admits to the CURVE servers of a ZMQ context those clients that have their key (ZMQ RFC 27, ZAP)."""

    def __init__(self, context: zmq.Context, key: str) -> None:
        self._public = z85.decode(zmq.curve_public(key.encode()))
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Answer the request that waits in `socket`."""
        version, request, *details = self.socket.recv_multipart()
        admitted = details[4:] == [self._public]  # after domain, address, identity and mechanism
        code, text = (b"200", b"OK") if admitted else (b"400", b"another key")
        self.socket.send_multipart([version, request, code, text, b"", b""])


def _is_key(key: str) -> bool:
    try:
        zmq.curve_public(key.encode())
    except (ValueError, zmq.ZMQError):
        return False
    return True
