"""Ranks on two hosts: the tokens of one process; a cut cable or a wrong address is told, with the rank."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from checkpoints import llama_config, save_random
from cores import run, start_core
from executors import ragged_asks
from hosts import WHY_NO_HOSTS, can_make_hosts, two_hosts

pytestmark = pytest.mark.skipif(not can_make_hosts(), reason=WHY_NO_HOSTS)
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_random(llama_config(), tmp_path_factory.mktemp("model"))


@contextmanager
def core_on(hosts, model, *, rendezvous=None, **options):
    """A core with rank 0 on the first host and rank 1 on the second: yields the lines it prints."""
    here, there = hosts
    setup = {
        "model": str(model),
        "address": here.address,
        "prefix": there.prefix,
        "rendezvous": rendezvous or here.address,
        "options": options,
    }
    command = [*here.prefix, sys.executable, HERE / "two_hosts_core.py", json.dumps(setup)]
    environment = os.environ | {"PYTHONPATH": str(HERE.parent)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield (json.loads(line) for line in process.stdout)
        finally:
            for member in (*psutil.Process(process.pid).children(recursive=True), process):
                member.kill()


def test_tokens_of_one_process_until_the_cable_is_cut(model):
    expected = [answer.tokens for answer in run(start_core(model), ragged_asks())]
    with two_hosts() as hosts, core_on(hosts, model) as lines:
        assert [next(lines) for _ in range(3)] == [expected] * 3
        hosts[1].ip("link", "set", hosts[1].cable, "down")
        kind, text = next(lines)
        assert kind == "WorkerDied"
        assert "rank 1 of 2 (process " in text
        assert list(lines) == []


def test_a_core_that_cannot_be_reached(model):
    with two_hosts() as hosts:
        hosts[1].ip("route", "add", "blackhole", hosts[0].address)
        with core_on(hosts, model, distributed_timeout_seconds=2) as lines:
            kind, text = next(lines)
    assert kind == "WorkerDied"
    assert "rank 1 of 2" in text
    assert f"cannot reach the core at tcp://{hosts[0].address}:" in text


def test_a_rendezvous_that_the_other_host_cannot_reach(model):
    """Whichever rank gives up first."""
    loopback = "127.0.0.1"
    with (
        two_hosts() as hosts,
        core_on(hosts, model, rendezvous=loopback, distributed_timeout_seconds=2) as lines,
    ):
        kind, text = next(lines)
    assert kind == "WorkerDied"
    assert (
        f"RendezvousError: rank 1 could not reach rank 0 at {loopback}:" in text
        or f"of 2 ranks these did not arrive at {loopback}:" in text
    )
