"""Something of a server with two ranks dies under a load of 64 streams, and no request notices."""

import asyncio
import random
import signal

import pytest
from recovery import assert_nothing_lost

from mixed_load import Load, differences, mixed, write_model
from parallel_server import ParallelServer, wait_until_idle

REQUESTS = mixed(64)
FLAGS = ("--device", "cpu", "--dtype", "float32", "--num-blocks-override", "1024")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def right(model):
    """The answers of one engine that nothing happens to."""
    with ParallelServer(model, *FLAGS) as server:
        answers = asyncio.run(Load(server.url).run(REQUESTS))
        wait_until_idle(server)
    assert [answer for answer in answers if "choices" not in answer] == []
    return answers


@pytest.fixture(scope="module")
def server(model):
    flags = ("--data-parallel-size", "2", "--api-server-count", "2", "--max-rank-restarts", "20")
    with ParallelServer(model, *FLAGS, *flags, "--step-timeout", "3") as server:
        yield server


def test_undisturbed(server, right):
    answers = asyncio.run(Load(server.url).run(REQUESTS))
    assert differences(answers, right) == {}


@pytest.mark.parametrize(("role", "number"), [("rank", signal.SIGKILL), ("rank", signal.SIGSTOP)])
def test_a_rank(server, right, role, number, record_property):
    def fault(load):
        random.Random(0).choice(server.processes(role)).send_signal(number)

    record_property("recovery", assert_nothing_lost(server, REQUESTS, right, fault))
    assert server.logged("go on elsewhere")
