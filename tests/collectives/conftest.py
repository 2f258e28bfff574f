"""Runs checks in four real processes, once for all test modules of this folder.

A module states what must hold on several ranks in functions `ranks_…(comm)`, and has a test that takes
`check` and `ranks`. Each process runs the functions with its half of the four ranks, whose ranks are then not
the global ones, with the last three, and with all of them; over gloo, and then over shared memory. Functions
`ranks_gloo_…` and `ranks_shared_memory_…` are for one of the two.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from collectives import LocalCommunicator

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

WORLD = 4
LIMIT_S = 120


class Ranks:
    """What became of the processes."""

    def __init__(self, folder: Path, returncodes: list[int]) -> None:
        self.returncodes = returncodes
        self._folder = folder

    def assert_passed(self, check: str) -> None:
        size = int(check.rstrip("]").split()[-1])
        for rank in range(1 if size == 3 else 0, WORLD):
            report = self._folder / f"{rank}.json"
            passed = json.loads(report.read_text()) if report.exists() else []
            assert check in passed, f"{check} did not pass on rank {rank}:\n{self.stderr()}"

    def stderr(self) -> str:
        return "\n".join((self._folder / f"{rank}.stderr").read_text() for rank in range(WORLD))


class Seat(LocalCommunicator):
    """A rank among others that are not there: enough to see what a layer holds."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "check" in metafunc.fixturenames:
        names = [name for name in vars(metafunc.module) if name.startswith("ranks_")]
        checks = [
            f"{name}[{kind} {size}]"
            for kind, others in (("gloo", "ranks_shared_memory"), ("shared_memory", "ranks_gloo"))
            for size in (2, 3, WORLD)
            for name in names
            if not name.startswith(others)
        ]
        metafunc.parametrize("check", checks)


@pytest.fixture
def seat() -> type[Seat]:
    return Seat


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("ranks")
    modules = sorted(str(path) for path in HERE.glob("test_*.py") if "(check, ranks)" in path.read_text())
    script = str(HERE / "rank_process.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(WORLD):
            command = [sys.executable, script, str(rank), str(WORLD), str(folder), *modules]
            with (folder / f"{rank}.stderr").open("wb") as stderr:
                processes.append(subprocess.Popen(command, stderr=stderr, env=environment, cwd=folder))
        deadline = time.monotonic() + LIMIT_S
        for process in processes:
            with suppress(subprocess.TimeoutExpired):  # killed below, which its return code tells
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return Ranks(folder, [process.returncode for process in processes])
