"""The coordinator's process, as who started it sees it."""

import os
import subprocess
import sys

import msgspec

from enginecore import logs
from enginecore.data_parallel.coordinator_process import CoordinatorSettings
from enginecore.data_parallel.messages import CoordinatorAddress
from enginecore.threads import user_environment

_COMMAND = (sys.executable, "-P", "-m", "enginecore.data_parallel.coordinator_process")


class CoordinatorChild:
    """A running coordinator of the ranks of this host."""

    def __init__(self, address: CoordinatorAddress) -> None:
        self._process = subprocess.Popen(
            _COMMAND,
            env=user_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        settings = CoordinatorSettings(address=address, log=logs.current())
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
        """Pass over what it reports; return False at its end."""
        return bool(os.read(self.fileno(), 1 << 16))

    def ending(self) -> str:
        """Wait for its end, and say how it ended."""
        code = self._process.wait()
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
