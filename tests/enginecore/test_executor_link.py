"""Links to workers on other hosts: what goes over them, who may connect, and how their ends are noticed."""

import select
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from collectives.ring import RingReader
from enginecore.config import make_config
from enginecore.executor.distributed import DistributedExecutor
from enginecore.executor.link import CoreEnd, LinkError, WorkerEnd
from enginecore.executor.placement import Placement, Seat, free_address
from enginecore.executor.steps import StepsStuck, StepWriter
from enginecore.executor.wire import Failure, LinkSettings, Progress, encode_message
from enginecore.model_files import ModelFiles

LIMIT_S = 20


@contextmanager
def worker(settings):
    command = [sys.executable, Path(__file__).with_name("link_process.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdin.write(msgspec.json.encode(settings) + b"\n")
        process.stdin.flush()
        try:
            yield process
        finally:
            process.kill()


def heard(core, until):
    """Wait for the core's end to become readable and take what it has, until something holds of it."""
    said = []
    while not until(said):
        assert select.select([core], [], [], LIMIT_S)[0], said
        said += core.receive()
    return said


def test_steps_and_messages_in_order():
    with closing(CoreEnd("127.0.0.1", LIMIT_S)) as core, worker(core.settings):
        texts = [f"step {i} " + "x" * (10 ** (i % 7)) for i in range(20)]
        for text in texts:
            core.write(text.encode())
        assert [message.text for message in heard(core, lambda said: len(said) == len(texts))] == texts
        assert (core.connected, core.ended) == (True, False)


def test_an_end_is_noticed_after_what_was_said():
    with closing(CoreEnd("127.0.0.1", LIMIT_S)) as core, worker(core.settings) as process:
        core.write(b"last")
        assert select.select([core], [], [], LIMIT_S)[0]
        said = heard(core, lambda said: said)
        process.kill()
        begin = time.monotonic()
        heard(core, lambda _: core.ended)
        assert time.monotonic() - begin < 2
        assert said == [Progress("last")]


def test_a_worker_ends_with_its_core():
    core = CoreEnd("127.0.0.1", LIMIT_S)
    with worker(core.settings) as process:
        core.write(b"hello")
        heard(core, lambda said: said)
        core.close()
        assert process.wait(LIMIT_S) == 0
        assert process.stderr.read() == b""


def test_strangers_are_not_taken_for_the_worker():
    with closing(CoreEnd("127.0.0.1", LIMIT_S)) as core, worker(core.settings):
        address = ("127.0.0.1", int(core.settings.messages.rpartition(":")[2]))
        with socket.create_connection(address):
            core.write(b"one")
            heard(core, lambda said: said)
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection(address) as stranger:
                stranger.sendall(words)
        other_key = zmq.curve_keypair()[0].decode()
        with pytest.raises(LinkError, match=r"cannot reach the core at tcp://127.0.0.1:\d+ within 0\.5 s"):
            WorkerEnd(msgspec.structs.replace(core.settings, key=other_key), timeout=0.5)
        core.write(b"two")
        heard(core, lambda said: said)
        assert not core.ended


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.77"])
def test_an_address_where_nobody_answers(host):
    """Of a closed port of this host, and of a host that is not there."""
    address = f"tcp://{free_address('127.0.0.1').replace('127.0.0.1', host)}"
    key = zmq.curve_keypair()[0].decode()
    begin = time.monotonic()
    with pytest.raises(LinkError, match=rf"cannot reach the core at {address} within 1 s: (the|no) "):
        WorkerEnd(LinkSettings(address, address, key), timeout=1)
    assert time.monotonic() - begin < 3


def test_a_failure_has_the_time_of_the_core_s_clock():
    """The worker's clock is two weeks behind, as that of a host that was started later."""
    behind = 14 * 24 * 3600 * 10**9
    with closing(CoreEnd("127.0.0.1", LIMIT_S)) as core, zmq.Context() as context:
        with context.socket(zmq.PUSH) as played:
            played.curve_serverkey = core.settings.key.encode()
            played.curve_publickey, played.curve_secretkey = zmq.curve_keypair()
            played.connect(core.settings.messages)
            failed = time.monotonic_ns()
            for message in (Progress("up"), Failure("KeyError", "1", "", failed - behind)):
                stamp = time.monotonic_ns() - behind
                played.send(stamp.to_bytes(8, "little", signed=True) + encode_message(message))
            said = heard(core, lambda said: len(said) == 2)
        assert said[1].at == pytest.approx(failed, abs=10**9)


def test_a_step_that_nobody_takes():
    with closing(CoreEnd("127.0.0.1", 0.2)) as core:
        steps = StepWriter(0, [core], 0.2)
        assert steps.ring is None
        with pytest.raises(StepsStuck, match=r"nobody takes steps at tcp://127.0.0.1:\d+ for 0.2 s"):
            steps.write(b"step")


def test_ranks_on_two_hosts_are_told_where_steps_come_from():
    """Rank 0 is on another host, the others are on the core's."""
    told = []

    def launch(settings):
        told.extend(settings)
        raise InterruptedError

    config = make_config({"model": "m", "device": "cpu", "tensor_parallel_size": 3})
    with closing(CoreEnd("127.0.0.1", LIMIT_S)) as core:
        seats = [Seat(0, 1, near=False, link=core), Seat(0, 2), Seat(1, 2)]
        placement = Placement(seats, "10.0.0.7:29500")
        with pytest.raises(InterruptedError):
            DistributedExecutor(config, ModelFiles("m", Path("never-read"), {}), launch, placement)
    far, *near = told
    assert (far.steps, far.link.key) == (None, core.settings.key)
    assert all(settings.steps and settings.link is None for settings in near)
    assert [(each.reader, each.local_rank, each.local_size) for each in near] == [(0, 0, 2), (1, 1, 2)]
    assert {each.rendezvous for each in told} == {"10.0.0.7:29500"}


def test_a_step_goes_to_the_ring_and_over_links():
    with closing(CoreEnd("127.0.0.1", LIMIT_S)) as core, worker(core.settings):
        steps = StepWriter(1, [core], LIMIT_S)
        reader = RingReader(steps.ring, 0)
        steps.write(b"step")
        assert reader.read(LIMIT_S) == b"step"
        assert heard(core, lambda said: said) == [Progress("step")]
        steps.close()


def test_an_address_that_is_not_ours():
    with pytest.raises(LinkError, match=r"the core cannot listen on 192\.0\.2\.77: "):
        CoreEnd("192.0.2.77", 1)
