"""The socket that the server listens on."""

import os
import socket
import stat
from pathlib import Path

from enginecore.errors import ConfigError
from octavo_serve.config import ServeConfig

BACKLOG = 2048
"""Connections that may wait while the server starts or is busy."""


def open_listener(options: ServeConfig) -> socket.socket:
    """Return the socket that the options ask for, after a look at the files that they name.

    Raises:
        ConfigError: a file of keys or certificates cannot be read, or the address not be listened on.
    """
    options.keys()
    options.tls()
    return listen(options.host, options.port) if options.uds is None else listen_on_path(options.uds)


def listen(host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens on `host` and `port`; port 0 takes any free one.

    On `::`, every network, it takes connections of both families.

    Raises:
        ConfigError: the port is taken or not allowed, or there is no such host.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        both = family == socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except socket.gaierror as error:
        raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror}") from error
    except OSError as error:
        # The library's own text names the address once more.
        reason = os.strerror(error.errno or 0)
        raise ConfigError(f"cannot listen on {host}, port {port}: {reason}") from error


def listen_on_path(path: str) -> socket.socket:
    """Return a Unix socket that listens at `path`, in the place of one that nobody listens on any more.

    Raises:
        ConfigError: somebody listens there, a file is in the way, or it cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_left_over(path)
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        # A path longer than 107 bytes has a message and no number.
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"cannot listen on {path}: {reason}") from error
    except ConfigError:
        listener.close()
        raise
    return listener


def url(listener: socket.socket, scheme: str = "http") -> str:
    """Return the address at which `listener` answers."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return (
        f"{scheme}://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"{scheme}://{host}:{port}"
    )


def _remove_left_over(path: str) -> None:
    try:
        if not stat.S_ISSOCK(Path(path).stat().st_mode):
            raise ConfigError(f"cannot listen on {path}: a file is in the way")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        try:
            caller.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
        else:
            raise ConfigError(f"cannot listen on {path}: another process does")
