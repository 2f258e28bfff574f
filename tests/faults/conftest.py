"""Real engines, started and killed: every test here is of the slow tier."""

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from mixed_load import Load, mixed, write_model
from parallel_server import FLAGS, ParallelServer, wait_until_idle

REQUESTS = 64


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter) -> None:
    """Report how long recoveries took."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "recovery":
                terminalreporter.write_line(f"all ranks run again after {value:.1f} s: {report.nodeid}")


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("small-model"))


@pytest.fixture(scope="session")
def requests():
    return mixed(REQUESTS)


@pytest.fixture(scope="session")
def right(small_model, requests):
    """The answers of one engine that nothing happens to."""
    with ParallelServer(small_model, *FLAGS) as server:
        answers = asyncio.run(Load(server.url).run(requests))
        wait_until_idle(server)
    assert [answer for answer in answers if "choices" not in answer] == []
    return answers
