"""The only rank of a server dies, or its steps fail: requests wait for it and go on."""

import asyncio
import signal
from pathlib import Path

import httpx
import pytest
from deadly_prompts import FAILS, FILE
from recovery import assert_nothing_lost

from mixed_load import Load, differences
from parallel_server import FLAGS, ParallelServer
from server_process import wait_until

HERE = str(Path(__file__).parent)
PROMPT = {"prompt": [1, 2, 3], "max_tokens": 20, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def fails(tmp_path_factory):
    return tmp_path_factory.mktemp("fails") / "once"


@pytest.fixture(scope="module")
def server(small_model, fails):
    plugin = ("--plugins", "deadly", "--plugin-path", HERE)
    with ParallelServer(small_model, *FLAGS, *plugin, **{FILE: str(fails)}) as server:
        yield server


def test_a_killed_core(server, requests, right, record_property):
    """Health says so meanwhile, and what comes meanwhile waits."""
    seen = []
    [rank] = server.processes("rank")

    def fault(load):
        rank.kill()
        wait_until(lambda: server.health().status_code == 503)
        seen.append(httpx.post(f"{server.url}/v1/completions", json=PROMPT, timeout=120).status_code)

    seconds = assert_nothing_lost(server, requests, right, fault, others=1)
    record_property("recovery", seconds)
    assert seen == [200]


def test_a_stopped_core(small_model, requests, right, record_property):
    with ParallelServer(small_model, *FLAGS, "--step-timeout", "3") as server:
        [rank] = server.processes("rank")
        seconds = assert_nothing_lost(server, requests, right, lambda load: rank.send_signal(signal.SIGSTOP))
        record_property("recovery", seconds)
        assert server.terminate() == 0


def test_two_ranks_with_hardly_any_cache(small_model, requests, right):
    """Requests wait for each other's blocks; a rank that has none to give holds up nobody elsewhere."""
    few = ("--num-blocks-override", "12", "--max-model-len", "180")
    with ParallelServer(small_model, *FLAGS, "--data-parallel-size", "2", *few) as server:
        assert differences(asyncio.run(Load(server.url).run(requests)), right) == {}
        assert server.terminate() == 0


def test_a_step_that_fails_once(server, requests, right, fails, record_property):
    fails.touch()
    said = {}

    def fault(load):
        body = PROMPT | {"prompt": [4, FAILS, 5]}
        said["answer"] = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)

    seconds = assert_nothing_lost(server, requests, right, fault, others=1)
    record_property("recovery", seconds)
    assert said["answer"].status_code == 200
    assert not fails.exists()
    assert server.logged("two tensors do not match")


def test_steps_that_fail_until_starts_run_out(small_model):
    """Callers get the cause, and the server ends."""
    plugin = ("--plugins", "broken", "--plugin-path", HERE, "--max-rank-restarts", "1")
    with ParallelServer(small_model, *FLAGS, *plugin) as server:

        async def ask() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
                asks = [client.post("/v1/completions", json=PROMPT) for _ in range(4)]
                return await asyncio.gather(*asks)

        answers = asyncio.run(ask())
        assert {answer.status_code for answer in answers} <= {500, 503}
        for answer in answers:
            assert "two tensors do not match" in answer.text
        assert server.ending() == 1
