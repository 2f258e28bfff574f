"""One rank's core process, as who started it sees it."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from enginecore.core.board import Board
from enginecore.core.settings import CoreSettings
from enginecore.messages import Failed, Loading, Ready
from enginecore.threads import user_environment

COMMAND = (sys.executable, "-P", "-m", "enginecore.core.process")
"""-P: files in the working folder are not taken for libraries of their names."""

_SECONDS_TO_END = 3.0
_MESSAGE = msgspec.json.Decoder(Loading | Ready | Failed)


class RankProcess:
    """A running core process."""

    def __init__(self, settings: CoreSettings) -> None:
        self.address = settings.address
        self.place = settings.place
        self.board = Board(Path(settings.board))
        self.began = time.monotonic()
        self.loading = Loading("starting the engine")
        """How far its start is, or was."""
        self.ready: Ready | None = None
        """Set once it has loaded the model."""
        self.failure: str | None = None
        self.failed_in_scheduling = False
        """The reason that it gave for its end."""
        self.killed_for: str | None = None
        """Why `kill` was called."""
        self._workers: list[int] = []
        """Descriptors of its worker processes."""
        self._unread = b""
        # A session of its own, so that Ctrl-C in a terminal reaches its starter alone, which then decides.
        self._process = subprocess.Popen(
            COMMAND,
            env=user_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(settings) + b"\n")
        self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """A descriptor that is readable when `read` has something to say."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def read(self) -> bool:
        """Take in what it reports; return False at its end."""
        data = os.read(self.fileno(), 1 << 16)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            message = _MESSAGE.decode(line)
            match message:
                case Loading():
                    self.loading = message
                case Failed():
                    self.failure, self.failed_in_scheduling = message.message, message.in_scheduling
                case Ready():
                    self.ready = message
                    self._workers = _descriptors(message.pids)
        return bool(data)

    def kill(self, reason: str) -> None:
        """End it at once, because of `reason`."""
        self.killed_for = self.killed_for or reason
        self._process.kill()

    def ending(self) -> str:
        """Wait for the end of the process and of its workers, and say how it ended."""
        code = self._process.wait()
        self._end_workers()
        if self.killed_for is not None:
            return self.killed_for
        if self.failure is not None:
            return self.failure
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"the engine process ended{'' if self.ready else ' while starting'}, {how}"

    def stop(self) -> None:
        """Ask it to end and wait, by force if it loads a model or does not go by itself."""
        if self.ready is None:
            self._process.kill()
        self.release()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._end_workers()

    def release(self) -> None:
        """Let it end."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()

    def _end_workers(self) -> None:
        """Wait until the workers have gone too, so that their devices are free; force those that hang."""
        until = time.monotonic() + _SECONDS_TO_END
        for descriptor in self._workers:
            end = select.poll()
            end.register(descriptor, select.POLLIN)
            if not end.poll(1000 * max(0.0, until - time.monotonic())):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                end.poll()
            os.close(descriptor)
        self._workers = []


def _descriptors(pids: Sequence[int]) -> list[int]:
    """Return descriptors that are readable once these processes have ended."""
    found = []
    for pid in pids if sys.platform == "linux" else ():
        with suppress(ProcessLookupError):
            found.append(os.pidfd_open(pid))
    return found
