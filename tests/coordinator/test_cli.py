"""`octavo-coordinator` as a command."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from data_parallel.coordinators import LIMIT_S, wait_for
from enginecore.data_parallel.connection import read_key, tcp_address
from enginecore.data_parallel.link import RankLink, ask_status
from enginecore.data_parallel.messages import LoadReport, RankStatus, RegisterRank, Status, WaveStatus
from enginecore.errors import ConfigError
from octavo_coordinator.config import CoordinatorConfig
from octavo_coordinator.table import table

PROGRAM = str(Path(sys.executable).parent / "octavo-coordinator")


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=LIMIT_S)


def free_ports() -> int:
    """A port that is free, as is the one above it."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
            return port


@contextmanager
def serving(*arguments: str):
    """A coordinator that has said where it listens, and its port."""
    port = free_ports()
    command = [PROGRAM, "--port", str(port), *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        said = ""
        while "listening on" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        yield process, port
    finally:
        process.kill()
        process.wait(LIMIT_S)
        process.stderr.close()


def test_help_and_version_load_nothing_heavy():
    code = (
        "import sys; from octavo_coordinator.cli import main\n"
        "try: main()\n"
        "except SystemExit as exit: assert exit.code == 0\n"
        "heavy = ('torch', 'transformers', 'tokenizers', 'numpy', 'zmq', 'asyncio')\n"
        "print('heavy:', [m for m in heavy if m in sys.modules])"
    )
    for flag, shown in (("--help", "--write-key TEXT"), ("--version", "octavo-coordinator 0.1.0")):
        done = subprocess.run(
            [sys.executable, "-c", code, flag], capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
        assert shown in done.stdout and "MODEL" not in done.stdout
        assert done.stdout.endswith("heavy: []\n")


def test_it_serves_who_has_the_key_and_shows_its_status(tmp_path):
    key = tmp_path / "key"
    assert run("--write-key", str(key)).returncode == 0
    with serving("--key-file", str(key)) as (_, port):
        where = f"127.0.0.1:{port}"
        address = tcp_address(where, read_key(key))
        link = RankLink(address, RegisterRank(6, 8, 2, 100, 16))
        try:
            link.report(LoadReport(6, 0.0, 3, 4, 25, 900, 0.012, 77))
            wait_for(lambda: link.receive() or any(rank.waiting for rank in ask_status(address).ranks))
        finally:
            link.close()
        asked = "--status", "--address", where, "--key-file", str(key)
        shown = run(*asked)
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.splitlines()[-1].split() == (
            ["6", "ready", "2", "3", "4", "75.0%", "900", "12.0", "ms", "77", "-"]
        )
        assert json.loads(run(*asked, "--json").stdout)["ranks"][0]["tokens"] == 900


def test_it_ends_at_once_when_asked():
    for number in (signal.SIGTERM, signal.SIGINT):
        with serving() as (process, _):
            os.kill(process.pid, number)
            assert process.wait(LIMIT_S) == 0


def test_a_port_that_is_taken_is_one_line():
    with serving() as (_, port):
        done = run("--port", str(port))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "octavo-coordinator: the coordinator cannot listen on tcp://"
    )


def test_nobody_there_is_one_line():
    done = run("--status", "--address", f"127.0.0.1:{free_ports()}")
    assert done.returncode == 2
    assert "no coordinator answers on 127.0.0.1:" in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"host": "0.0.0.0"}, "--key-file"),
        ({"host": "10.1.2.3"}, "--key-file"),
        ({"port": 0}, "port must be between"),
        ({"port": 65535}, "port must be between"),
        ({"http_port": -1}, "http_port must be between"),
        ({"address": "a:1"}, "address needs --status"),
        ({"json": True}, "json needs --status"),
    ],
)
def test_wrong_options_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        CoordinatorConfig(**options)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_host_needs_no_key(host):
    assert CoordinatorConfig(host=host).key_file is None


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:x", "host:65535", "host:0"])
def test_an_address_is_a_host_and_a_port(text):
    with pytest.raises(ConfigError, match="host:port"):
        tcp_address(text, None)


def test_the_table_tells_of_waves_and_of_ranks_that_load():
    status = Status(
        12.3,
        4567,
        89,
        [0, 1],
        [RankStatus(0, 1, ready=False, age=0.1, wave=4)],
        WaveStatus(group=1, ended=4, running=True, steps=640, empty=32),
    )
    lines = table(status).splitlines()
    assert lines[:3] == [
        "up for 12 s, 4,567 messages, 89 snapshots",
        "front-ends: 2",
        "waves: 4 of 640 steps ended, one runs; group restarts: 1; empty steps: 32",
    ]
    assert lines[-1].split()[:3] == ["0", "loading", "1"]
