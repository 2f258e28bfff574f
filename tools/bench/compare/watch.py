"""Run a record in its own process and watch, from outside, what it and others take of the machine."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil

from compare.peers import PEERS
from compare.tasks import Task

QUIET = 0.3
"""Cores that other processes may use while a record is made; more, and the record is flagged."""

PACKAGES = Path(__file__).resolve().parents[1]


class Usage(NamedTuple):
    """Processor time in seconds until a moment: of the machine, and of this process and its descendants."""

    moment: float
    machine: float
    own: float

    @classmethod
    def now(cls) -> Self:
        times = psutil.cpu_times()
        machine = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
        return cls(time.monotonic(), machine, sum(map(_processor_seconds, _tree(os.getpid()))))

    def others_since(self, before: Self) -> float:
        """Cores that other processes used, on average, since `before`."""
        used = (self.machine - before.machine) - (self.own - before.own)
        return max(0.0, used / (self.moment - before.moment))


def wait_until_quiet(seconds: float) -> None:
    """Wait until others use few cores for a second, at most as long as given."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        before = Usage.now()
        time.sleep(1)
        if Usage.now().others_since(before) < QUIET:
            return


def resident_mib(process: int) -> float:
    """Resident memory of a process and its descendants."""
    total = 0
    for each in _tree(process):
        try:
            total += each.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 2**20


def _tree(process: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(process)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _processor_seconds(process: psutil.Process) -> float:
    """Also of those of its children that have ended."""
    try:
        return sum(process.cpu_times()[:4])
    except psutil.NoSuchProcess:
        return 0.0


class Recorder:
    """The process that makes a record."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process, self._log = process, log

    def event(self, name: str) -> dict[str, Any]:
        """Wait for an event and return its fields.

        Raises:
            RuntimeError: the process ended, or ran out of time, before.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            raise RuntimeError(f"ended with status {status} before it was {name}; see {self._log}")
        fields = json.loads(line)
        assert fields.pop("event") == name
        return fields

    def go_on(self) -> None:
        """Let the process go on after an event.

        Raises:
            RuntimeError: it has ended, or ran out of time.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise RuntimeError(f"ended with status {self.process.wait()}; see {self._log}") from error


@contextmanager
def recorder(task: Task, log: Path, limit: float) -> Generator[Recorder]:
    """Start the process of a record; end it and all that it started, afterwards or after `limit` seconds."""
    variables = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    with log.open("a") as errors:
        print(f"--- {task.to_json()}", file=errors, flush=True)
        process = subprocess.Popen(
            [python_of(task), "-P", "-m", "compare.record", task.to_json()],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    timer = threading.Timer(limit, _kill_group, [process.pid])
    timer.start()
    try:
        yield Recorder(process, log)
        process.wait()
    finally:
        timer.cancel()
        _kill_group(process.pid)
        process.wait()


def python_of(task: Task) -> str:
    """Return the interpreter of the environment of the task's engine."""
    environment = PEERS[task.peer].environment
    return sys.executable if environment is None else str(Path(task.folder) / environment / "bin/python")


def make_record(task: Task, *, log: Path, limit: float, quiet: float) -> dict[str, Any]:
    """Return the figures of `task`, and what was used meanwhile; wait `quiet` seconds for a quiet machine.

    Raises:
        RuntimeError: the engine failed, or took longer than `limit` seconds.
    """
    with recorder(task, log, limit) as own:
        process = own.event("ready")["process"]
        wait_until_quiet(quiet)
        before = Usage.now()
        own.go_on()
        figures = own.event("done")
        figures["others_cores"] = Usage.now().others_since(before)
        figures["resident_mib"] = resident_mib(process)
        own.go_on()
        tokens = own.event("tokens")["tokens"]
        own.go_on()
    if tokens:
        figures["tokens"] = tokens
    return figures


def _kill_group(process: int) -> None:
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:
        return
