"""Coordinator processes for tests."""

import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from enginecore.data_parallel.coordinator_process import CoordinatorPorts, CoordinatorSettings
from enginecore.data_parallel.messages import CoordinatorAddress
from enginecore.messages import Failed

LIMIT_S = 60


class CoordinatorUnderTest:
    """A coordinator in a process of its own, and what it reported when it started."""

    def __init__(self, address: CoordinatorAddress, http_port: int | None = None) -> None:
        command = [sys.executable, "-P", "-m", "enginecore.data_parallel.coordinator_process"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        settings = CoordinatorSettings(address, http_port=http_port)
        self.process.stdin.write(msgspec.json.encode(settings) + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        self.started = msgspec.json.decode(line, type=CoordinatorPorts | Failed)

    @property
    def address(self) -> CoordinatorAddress:
        return self.started.address

    def kill(self) -> None:
        self.process.kill()
        self._wait()

    def stop(self) -> int:
        """Close the pipe that it watches, and return its exit status."""
        self.process.stdin.close()
        return self._wait()

    def _wait(self) -> int:
        status = self.process.wait(LIMIT_S)
        self.process.stdin.close()
        self.process.stdout.close()
        return status


def wait_for(condition: Callable[[], object]) -> object:
    """Return what `condition` returns once it is true."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found
