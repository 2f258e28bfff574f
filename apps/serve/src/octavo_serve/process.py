"""One HTTP process of the server: `python -m octavo_serve.process`, started by the supervisor.

Its settings are the first line of standard input, and the ups and downs of ranks those that follow; it ends
when that closes. On standard output it says when it is ready, or why it could not start.
"""

import os
import signal
import socket
import sys
from pathlib import Path

import msgspec

from enginecore import PipedRanks, logs
from enginecore.errors import OctavoError
from octavo_serve.messages import HttpFailed, HttpMessage, HttpSettings


def main() -> int:
    """Serve until asked to stop."""
    # Ctrl-C reaches the supervisor, which decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    settings = msgspec.json.decode(line, type=HttpSettings)
    logs.configure(settings.log)
    # Only now what takes a while to import.
    from enginecore import AsyncEngine
    from octavo_serve.server import run

    def report(message: HttpMessage) -> None:
        output.write(msgspec.json.encode(message) + b"\n")
        output.flush()

    def engine() -> AsyncEngine:
        boards = {rank: Path(path) for rank, path in settings.boards.items()}
        return AsyncEngine(
            settings.engine,
            name=next(iter(settings.server.served_model_name), None),
            metrics_prefix=settings.server.metrics_prefix,
            metrics_folder=settings.metrics,
            ranks=PipedRanks(boards, settings.coordinator, sys.stdin.buffer, lambda: os._exit(1)),
            number=settings.number,
        )

    listener = socket.socket(fileno=settings.listener)
    try:
        return run(
            listener,
            engine,
            settings.server,
            settings.index,
            report,
            settings.started,
            settings.at_once,
            Path(settings.shared),
        )
    except OctavoError as error:
        report(HttpFailed(str(error)))
        return 2


if __name__ == "__main__":
    exit_status = main()
    sys.stderr.flush()
    # At once: the thread that reads standard input would be in the way of Python's own end.
    os._exit(exit_status)
