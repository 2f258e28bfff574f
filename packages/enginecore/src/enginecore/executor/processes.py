"""Workers as child processes of this one, on this host.

A worker is `python -m enginecore.worker.process`. It gets its settings on standard input, which stays open
and whose closing ends it; it answers on standard output; what it writes to standard error appears on ours.
"""

import collections
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from enginecore.errors import ConfigError
from enginecore.executor.distributed import Ending, WorkerHandle
from enginecore.executor.wire import LENGTH, WorkerMessage, WorkerSettings, decode_message

_KEPT_LINES = 40
_CHUNK = 1 << 20
_CHATTER = re.compile(r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks")
"""What gloo prints of every group that it has made."""


def start_processes(settings: Sequence[WorkerSettings]) -> list[WorkerHandle]:
    """Start a process for each of the settings.

    Raises:
        ConfigError: this host has fewer devices than ranks.
    """
    _check_devices(settings[0].config.device, len(settings))
    started: list[WorkerHandle] = []
    try:
        for each in settings:
            started.append(WorkerProcess(each))
    except BaseException:
        for worker in started:
            worker.end(0)
        raise
    return started


class WorkerProcess:
    """A worker's process; see `WorkerHandle`."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.rank = settings.rank
        self.ended = False
        self._received = bytearray()
        # A session of its own, so that Ctrl-C in a terminal reaches the parent alone, which then decides.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "enginecore.worker.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        # The thread holds no reference to this object, so that dropping it closes the pipes.
        self._repeating = threading.Thread(
            target=_repeat, args=(self._process.stderr, self._lines, self.rank), daemon=True
        )
        self._repeating.start()
        os.set_blocking(self.fileno(), False)
        assert self._process.stdin is not None
        # Its end, if it has ended already, shows in `receive`.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(settings) + b"\n")
            self._process.stdin.flush()

    def fileno(self) -> int:
        """The descriptor of its standard output."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def receive(self) -> list[WorkerMessage]:
        """Return its messages since the last call."""
        while True:
            try:
                data = os.read(self.fileno(), _CHUNK)
            except BlockingIOError:
                break
            if not data:
                self.ended = True
                break
            self._received += data
        return list(self._whole_messages())

    def ending(self) -> Ending:
        """Wait for its end, and for its last words on standard error."""
        self.end(1.0)
        self._repeating.join(1.0)
        code = self._process.returncode
        if code >= 0:
            return Ending(f"ended with exit status {code}", list(self._lines))
        return Ending(f"was killed by signal {-code} ({signal.strsignal(-code)})", list(self._lines))

    def release(self) -> None:
        """Close its standard input, whereupon it ends itself."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def end(self, timeout: float) -> None:
        """Wait for its end, and force it after `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _whole_messages(self) -> list[WorkerMessage]:
        found, at = [], 0
        while len(self._received) >= at + LENGTH.size:
            (size,) = LENGTH.unpack_from(self._received, at)
            end = at + LENGTH.size + size
            if len(self._received) < end:
                break
            found.append(decode_message(bytes(self._received[at + LENGTH.size : end])))
            at = end
        del self._received[:at]
        return found


def _repeat(stderr: IO[bytes], lines: collections.deque[str], rank: int) -> None:
    """Show on our standard error what a worker writes to its own, and keep the last of it."""
    for line in stderr:
        text = line.decode(errors="replace").rstrip()
        if _CHATTER.match(text):
            continue
        lines.append(text)
        print(f"[rank {rank}] {text}", file=sys.stderr, flush=True)


def _check_devices(device: str, ranks: int) -> None:
    # Where there is no driver torch need not be imported here to find that there is no device.
    if device == "cpu" or (device == "auto" and not Path("/proc/driver/nvidia").exists()):
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (count or device == "cuda") and count < ranks:
        raise ConfigError(f"{ranks} ranks need a CUDA device each, and this machine has {count}")
