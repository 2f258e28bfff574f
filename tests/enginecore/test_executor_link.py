"""Links between the core and its workers: what goes over them, who may connect, how ends are noticed."""

import os
import select
import socket
import stat
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from enginecore.executor.link import CoreEnd, LinkError, WorkerEnd
from enginecore.executor.messages import Failure, LinkSettings, Progress, encode_message

LIMIT_S = 20


@pytest.fixture(params=["this host only", "TCP"])
def core(request):
    with closing(CoreEnd(None if request.param == "this host only" else "127.0.0.1", LIMIT_S)) as core:
        yield core


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


def test_data_and_messages_in_order(core):
    with worker(core.settings):
        texts = [f"step {i} " + "x" * (10 ** (i % 7)) for i in range(20)]
        for text in texts:
            core.send(text.encode())
        assert [message.text for message in heard(core, lambda said: len(said) == len(texts))] == texts
        assert (core.connected, core.ended) == (True, False)


def test_an_end_is_noticed_after_what_was_said(core):
    with worker(core.settings) as process:
        core.send(b"last")
        assert select.select([core], [], [], LIMIT_S)[0]
        said = heard(core, lambda said: said)
        process.kill()
        heard(core, lambda _: core.ended)
        assert said == [Progress("last")]


def test_a_failure_is_heard_before_the_end(core):
    with worker(core.settings) as process:
        core.send(b"fail")
        [failure] = heard(core, lambda said: said)
        assert (failure.kind, failure.message) == ("KeyError", "'fail'")
        core.close()
        assert process.wait(LIMIT_S) == 0


def test_a_worker_ends_with_its_core(core):
    with worker(core.settings) as process:
        core.send(b"hello")
        heard(core, lambda said: said)
        core.close()
        assert process.wait(LIMIT_S) == 0
        assert process.stderr.read() == b""


def test_a_worker_that_ends_before_it_connects(core):
    with subprocess.Popen(["false"]) as process:
        descriptor = os.pidfd_open(process.pid)
        core.watch(descriptor)
        assert heard(core, lambda _: core.ended) == []
        assert not core.connected
    os.close(descriptor)


def test_the_sockets_of_this_host_lie_in_a_private_folder_until_the_worker_has_come():
    with closing(CoreEnd(None, LIMIT_S)) as core:
        paths = [Path(end.removeprefix("ipc://")) for end in (core.settings.down, core.settings.up)]
        assert all(stat.S_ISSOCK(path.stat().st_mode) for path in paths)
        assert stat.S_IMODE(paths[0].parent.stat().st_mode) == 0o700
        assert core.settings.key is None
        with worker(core.settings):
            core.send(b"hello")
            heard(core, lambda said: said)
            assert not paths[0].parent.exists()


def test_strangers_are_not_taken_for_the_worker():
    with closing(CoreEnd("127.0.0.1", LIMIT_S)) as core, worker(core.settings):
        address = ("127.0.0.1", int(core.settings.up.rpartition(":")[2]))
        with socket.create_connection(address):
            core.send(b"one")
            heard(core, lambda said: said)
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection(address) as stranger:
                stranger.sendall(words)
        other_key = zmq.curve_keypair()[0].decode()
        with pytest.raises(LinkError, match=r"cannot reach the core at tcp://127.0.0.1:\d+ within 0\.5 s"):
            WorkerEnd(msgspec.structs.replace(core.settings, key=other_key, timeout=0.5))
        core.send(b"two")
        heard(core, lambda said: said)
        assert not core.ended


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.77"])
def test_an_address_where_nobody_answers(host):
    """Of a port of this host where nobody listens, and of a host that is not there."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        address = f"tcp://{host}:{deaf.getsockname()[1]}"
        key = zmq.curve_keypair()[0].decode()
        with pytest.raises(LinkError, match=rf"cannot reach the core at {address} within 1 s: (the|no) "):
            WorkerEnd(LinkSettings(address, address, key, timeout=1))


def test_a_core_that_was_killed_before(tmp_path):
    """Its sockets are there, and nobody listens; the worker clears them away."""
    folder = tmp_path / "private"
    folder.mkdir()
    address = f"ipc://{folder}/down"
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(folder / "down"))
    with pytest.raises(LinkError, match=r"cannot reach the core at ipc://.* the connection was refused"):
        WorkerEnd(LinkSettings(address, address, None, timeout=LIMIT_S))
    assert not folder.exists()


def test_a_failure_has_the_time_of_the_core_s_clock():
    """The worker's clock is two weeks behind, as that of a host that was started later."""
    behind = 14 * 24 * 3600 * 10**9
    with closing(CoreEnd("127.0.0.1", LIMIT_S)) as core, zmq.Context() as context:
        with context.socket(zmq.PUSH) as played:
            played.curve_serverkey = core.settings.key.encode()
            played.curve_publickey, played.curve_secretkey = zmq.curve_keypair()
            played.connect(core.settings.up)
            failed = time.monotonic_ns()
            for message in (Progress("up"), Failure("KeyError", "1", "", failed - behind)):
                stamp = time.monotonic_ns() - behind
                played.send(stamp.to_bytes(8, "little", signed=True) + encode_message(message))
            said = heard(core, lambda said: len(said) == 2)
        assert said[1].at == pytest.approx(failed, abs=10**9)


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_data_that_nobody_takes(host):
    with (
        closing(CoreEnd(host, 0.2)) as core,
        pytest.raises(LinkError, match=r"nobody receives from (ipc|tcp)://\S+ within 0.2 s"),
    ):
        core.send(b"step")


def test_an_address_that_is_not_ours():
    with pytest.raises(LinkError, match=r"the core cannot listen on 192\.0\.2\.77: "):
        CoreEnd("192.0.2.77", 1)
