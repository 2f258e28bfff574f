"""Something of a server with two ranks dies under a load of 64 requests, and no request notices."""

import asyncio
import random
import signal

import psutil
import pytest
from recovery import assert_nothing_lost, run_with

from mixed_load import Load, differences
from parallel_server import FLAGS, ParallelServer, total, wait_until_idle
from server_process import wait_until

TWO_RANKS = ("--data-parallel-size", "2", "--api-server-count", "2")


@pytest.fixture(scope="module")
def server(small_model):
    bounds = ("--max-rank-restarts", "20", "--step-timeout", "3")
    with ParallelServer(small_model, *FLAGS, *TWO_RANKS, *bounds) as server:
        yield server


def test_undisturbed(server, requests, right):
    answers = asyncio.run(Load(server.url).run(requests))
    assert differences(answers, right) == {}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank(server, requests, right, number, record_property):
    resumed = server.logged("go on elsewhere")
    # Found before, since a search of all processes may take longer than the load.
    one = random.Random(0).choice(server.processes("rank"))
    seconds = assert_nothing_lost(server, requests, right, lambda load: one.send_signal(number))
    record_property("recovery", seconds)
    assert server.logged("go on elsewhere") > resumed


def test_both_ranks(server, requests, right, record_property):
    both = server.processes("rank")

    def fault(load):
        for rank in both:
            rank.kill()

    record_property("recovery", assert_nothing_lost(server, requests, right, fault))


def test_the_coordinator(server, requests, right, record_property):
    [before] = server.processes("coordinator")
    record_property("recovery", assert_nothing_lost(server, requests, right, lambda load: before.kill()))
    wait_until(lambda: len(server.processes("coordinator")) == 1)
    assert server.processes("coordinator") != [before]


def test_an_http_process(server, requests, right):
    """Only its own connections are cut; the others' answers, and what is counted, stay right."""
    ports = set()
    process = server.processes("http")[0]

    def fault(load):
        process.suspend()
        ports.update(end.raddr.port for end in process.net_connections() if end.raddr)
        process.kill()

    before = server.counts()
    answers, load = run_with(server, requests, fault)
    cut = {index for index, port in load.ports.items() if port in ports}
    failed = {index for index, answer in enumerate(answers) if "choices" not in answer}
    assert failed <= cut
    assert set(differences(answers, right)) == failed
    wait_until(lambda: len(server.processes("http")) == 2)
    wait_until_idle(server)
    grown = total(server.counts(), "octavo_request_success_total") - total(
        before, "octavo_request_success_total"
    )
    assert grown >= len(answers) - len(failed)
    again = asyncio.run(Load(server.url).run(requests))
    assert differences(again, right) == {}


def test_it_ends_while_a_rank_starts_again(server):
    """The last test of this server."""
    server.processes("rank")[0].kill()
    wait_until(lambda: server.logged("starting rank") > server.logged("is up again"))
    assert server.terminate() == 0


def test_a_worker(small_model, requests, right, record_property):
    """With tensor-parallel ranks."""
    with ParallelServer(small_model, *FLAGS, *TWO_RANKS, "--tensor-parallel-size", "2") as server:
        one = random.Random(1).choice(server.processes("worker"))
        record_property("recovery", assert_nothing_lost(server, requests, right, lambda load: one.kill()))
        assert len(server.processes("worker")) == 4
        assert server.terminate() == 0


def test_a_rank_whose_starts_have_run_out(small_model, requests, right):
    """The other one goes on, which /health says."""
    with ParallelServer(small_model, *FLAGS, *TWO_RANKS, "--max-rank-restarts", "1") as server:
        first, second = server.processes("rank")
        first.kill()
        wait_until(lambda: server.logged("is up again") == 1)
        [started] = [process for process in server.processes("rank") if process not in (first, second)]
        started.kill()
        wait_until(lambda: server.logged("is not started again") == 1)
        wait_until(lambda: "degraded" in server.health().text)
        assert server.health().status_code == 200
        answers = asyncio.run(Load(server.url).run(requests))
        assert differences(answers, right) == {}
        server.processes("http")[0].kill()
        wait_until(lambda: len(server.processes("http")) == 2)
        again = asyncio.run(Load(server.url).run(requests))
        assert differences(again, right) == {}
        assert server.terminate() == 0


def test_the_supervisor(small_model, requests):
    """Everything ends with it."""
    with ParallelServer(small_model, *FLAGS, *TWO_RANKS) as server:
        answers, _ = run_with(server, requests, lambda load: server.process.kill())
        assert any("cut" in answer for answer in answers)
        server.ending()
        assert not psutil.pid_exists(server.process.pid)
