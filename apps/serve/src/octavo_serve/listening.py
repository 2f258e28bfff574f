"""The socket that the server listens on."""

import os
import socket

from enginecore.errors import ConfigError

BACKLOG = 2048
"""Connections that may wait while the server starts or is busy."""


def listen(host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens on `host` and `port`; port 0 takes any free one.

    Raises:
        ConfigError: the port is taken or not allowed, or there is no such host.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except socket.gaierror as error:
        raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror}") from error
    except OSError as error:
        # The library's own text names the address once more.
        reason = os.strerror(error.errno or 0)
        raise ConfigError(f"cannot listen on {host}, port {port}: {reason}") from error


def url(listener: socket.socket) -> str:
    """Return the address at which `listener` answers."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"
