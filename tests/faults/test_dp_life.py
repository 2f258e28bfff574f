"""A server with one rank or two: signals and draining, ports in use, an idle rank beside a busy one."""

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from mixed_load import Load, differences
from parallel_server import FLAGS, ParallelServer, by_rank, total, wait_until_idle
from server_process import wait_until

BODY = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
LONG = [BODY | {"prompt": text, "max_tokens": 900} for text in ("abc", "xyz")]
SHORT = [BODY | {"prompt": text, "max_tokens": 200} for text in ("abc", "xyz")]
RANKS = pytest.mark.parametrize("ranks", [1, 2])


def of(ranks):
    return ("--data-parallel-size", str(ranks))


def signalled(server, bodies, *numbers):
    """Send requests, then signals once they all stream; return the answers and the exit status."""
    load = Load(server.url)
    sent = threading.Event()

    def on_chunk(count):
        if count >= 8 and not sent.is_set():
            sent.set()
            for number in numbers:
                server.process.send_signal(number)

    load.on_chunk = on_chunk
    return asyncio.run(load.run(bodies)), server.ending()


@RANKS
def test_a_drain_of_no_time(small_model, ranks):
    with ParallelServer(small_model, *FLAGS, *of(ranks), "--shutdown-timeout", "0") as server:
        answers, status = signalled(server, LONG, signal.SIGTERM)
    assert status == 0
    assert ["shutting down" in str(answer) or "abort" in str(answer) for answer in answers] == [True] * 2


@RANKS
def test_a_drain(small_model, ranks):
    with ParallelServer(small_model, *FLAGS, *of(ranks), "--shutdown-timeout", "60") as server:
        answers, status = signalled(server, SHORT, signal.SIGTERM)
    assert status == 0
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [200, 200]


def test_an_impatient_caller(small_model):
    """A second Ctrl-C ends a drain that has time."""
    with ParallelServer(small_model, *FLAGS, *of(2), "--shutdown-timeout", "600") as server:
        load = Load(server.url)
        hurry = threading.Thread(target=lambda: server.process.send_signal(signal.SIGINT))

        def on_chunk(count):
            if count == 8:
                server.process.send_signal(signal.SIGINT)
                wait_until(lambda: server.logged("draining") > 0)
                hurry.start()

        load.on_chunk = on_chunk
        answers = asyncio.run(load.run(LONG))
        assert server.ending() == 0
    assert ["shutting down" in str(answer) or "abort" in str(answer) for answer in answers] == [True] * 2


@RANKS
def test_a_signal_while_it_loads(small_model, ranks):
    with ParallelServer(small_model, *FLAGS, *of(ranks), wait=False) as server:
        wait_until(lambda: len(server.processes("rank")) == ranks)
        assert server.terminate() == 0


@RANKS
def test_a_port_in_use(small_model, ranks):
    program = str(Path(sys.executable).parent / "octavo-serve")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [program, str(small_model), "--port", port, *of(ranks)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert port in ended.stderr
    assert "rank" not in ended.stderr


def test_an_idle_rank_beside_a_busy_one(small_model):
    """Dense ranks run free: one has no steps while the other has."""
    with ParallelServer(small_model, *FLAGS, *of(2)) as server:

        def steps():
            return by_rank(server.counts(), "octavo_iteration_tokens_total_count")

        one = asyncio.run(Load(server.url).run([LONG[0] | {"max_tokens": 64}]))
        wait_until_idle(server)
        ran = steps()
        assert sorted(count > 0 for count in ran.values()) == [False, True]
        again = asyncio.run(Load(server.url).run([LONG[0] | {"max_tokens": 64}]))
        assert differences(again, one) == {}
        both = asyncio.run(Load(server.url).run([SHORT[0] | {"max_tokens": 8}, LONG[0] | {"max_tokens": 64}]))
        assert differences(both[1:], one) == {}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG[1]) as left:
            next(left.iter_bytes())
        wait_until_idle(server)
        full = asyncio.run(Load(server.url).run([{"prompt": "x" * 1000, "max_tokens": 24} | BODY]))
        assert full[0]["usage"]["total_tokens"] == 1024
        assert total(server.counts(), "octavo_engine_up") == 2
        assert server.terminate() == 0


def test_a_quick_restart_on_the_same_port(small_model):
    with ParallelServer(small_model, *FLAGS) as server:
        port = server.url.rsplit(":", 1)[1]
        assert server.terminate() == 0
    with ParallelServer(small_model, *FLAGS, "--port", port) as server:
        assert server.url.endswith(port)
        assert server.health().status_code == 200
