"""Start and stop an engine's HTTP server."""

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import NamedTuple


class Command(NamedTuple):
    """How to start a server."""

    arguments: list[str]
    variables: Mapping[str, str]


def free_port() -> int:
    """Return a port of the loopback address on which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def running(command: Command, port: int) -> Generator[int]:
    """Run a server from the moment when it is ready; give its process id. Its output goes to stderr.

    Raises:
        RuntimeError: the server ended before it was ready.
    """
    process = subprocess.Popen(
        command.arguments,
        env={**os.environ, **command.variables},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
    )
    try:
        while not _ready(port):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with status {process.returncode}")
            time.sleep(0.1)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
