"""A worker in a process of its own; `executor.processes` starts it.

Its settings come as one line of JSON on standard input, which its parent keeps open: when that closes,
because the parent ended in whatever way, so does this process. What it has to say goes to standard output,
each message after its length.
"""

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from enginecore.executor.wire import LENGTH, WorkerMessage, WorkerSettings, encode_message
from enginecore.parent import end_with_parent, private_stdout


def main() -> int:
    """Serve until the parent goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    output = private_stdout()
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    end_with_parent()
    settings = msgspec.json.decode(line, type=WorkerSettings)
    # Only now what takes seconds to import: the parent may end meanwhile.
    from enginecore.worker.loop import serve

    status = serve(settings, _sender(output))
    sys.stderr.flush()
    # At once, without waiting for the threads of torch and gloo, of which some may wait for other ranks.
    os._exit(status)


def _sender(output: BinaryIO) -> Callable[[WorkerMessage], None]:
    lock = threading.Lock()

    def send(message: WorkerMessage) -> None:
        body = encode_message(message)
        with lock:
            output.write(LENGTH.pack(len(body)) + body)
            output.flush()

    return send


if __name__ == "__main__":
    sys.exit(main())
