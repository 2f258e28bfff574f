"""Ranks that meet, and ranks that do not: as threads where only the meeting matters, else as processes."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from collectives import Grid, LocalCommunicator, RendezvousError, connect, make_communicators, rendezvous
from collectives.deadline import call_within
from collectives.interfaces import gloo_interface, interface_of, local_address
from hosts import WHY_NO_HOSTS, can_make_hosts, two_hosts

pytestmark = pytest.mark.xdist_group("rendezvous")

LIMIT_S = 90


@pytest.fixture
def listener():
    """A socket of rank 0 that listens on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def address(listener):
    return address_of(listener)


@pytest.fixture
def reserved():
    """An address of this host where nobody listens yet, and where only rank 0 will."""
    with reserve("127.0.0.1", socket.AF_INET) as holder:
        yield address_of(holder)


def reserve(host, family):
    """Return a socket that holds a free port; only one that sets SO_REUSEADDR, as rank 0 does, can listen."""
    holder = socket.socket(family)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((host, 0))
    return holder


def address_of(listener):
    return f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def started(commands, descriptors):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("GLOO_SOCKET_IFNAME", None)
    processes = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            pass_fds=descriptors,
        )
        for command in commands
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_ranks(timeout, *meetings, ranks, listeners=(), prefix=lambda rank: []):
    """The lines that the processes of `ranks` write, parsed."""
    script = str(Path(__file__).with_name("grid_process.py"))
    descriptors = [listener.fileno() for listener in listeners]
    inherited = ["--listeners", ",".join(map(str, descriptors))] if descriptors else []
    commands = [
        [*prefix(rank), sys.executable, script, str(rank), str(timeout), *inherited, *meetings]
        for rank in ranks
    ]
    with started(commands, descriptors) as processes:
        ends = [process.communicate(timeout=LIMIT_S) for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes), ends
    # Gloo has lines of its own to say.
    return [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in ends]


def in_threads(*functions):
    """What each function returned or raised."""
    outcomes = [None] * len(functions)

    def run(place, function):
        try:
            outcomes[place] = function()
        except Exception as error:
            outcomes[place] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return outcomes


@pytest.mark.slow
def test_four_processes_get_the_groups_of_a_grid_and_of_another_afterwards():
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        meetings = [
            part
            for listener, lengths in zip(listeners, ("2,1,2", "1,2,2", "1,1,4"))
            for part in (address_of(listener), lengths)
        ]
        lines = run_ranks(60, *meetings, ranks=range(4), listeners=listeners)
    members = [
        [{axis: line[axis]["members"] for axis in ("world", "tp", "pp", "ep")} for line in of_rank]
        for of_rank in lines
    ]
    everyone = [0, 1, 2, 3]
    assert members == [
        [
            {"world": everyone, "tp": tp, "pp": [rank], "ep": everyone},  # dp 2, tp 2
            {"world": everyone, "tp": tp, "pp": pp, "ep": tp},  # pp 2, tp 2
            {"world": everyone, "tp": everyone, "pp": [rank], "ep": everyone},  # tp 4
        ]
        for rank, tp, pp in [
            (0, [0, 1], [0, 2]),
            (1, [0, 1], [1, 3]),
            (2, [2, 3], [0, 2]),
            (3, [2, 3], [1, 3]),
        ]
    ]
    for of_rank in lines:
        assert [line["shared"] for line in of_rank] == [False, False, True]
        for line in of_rank:
            assert line["interface"] is None  # nothing is left in the environment
            for axis in ("world", "tp", "pp", "ep"):
                place = line[axis]
                assert place["size"] == len(place["members"])
                alone = place["size"] == 1
                assert place["kind"] == ("LocalCommunicator" if alone else "SharedMemoryCommunicator")


def test_ranks_that_do_not_arrive_are_named(listener, address):
    came = in_threads(
        lambda: connect(0, 4, address, 1.5, listener=listener), lambda: connect(2, 4, address, 1.5)
    )
    for error in came:
        assert isinstance(error, RendezvousError)
    assert str(came[0]) == f"of 4 ranks these did not arrive at {address} within 1.5 s: 1, 3"
    # Rank 0 may have given up, and gone, a moment before.
    assert str(came[1]) in (str(came[0]), f"rank 2 lost rank 0 while it waited at {address} for all 4 ranks")


def test_all_who_meet_share_a_store(listener, address):
    stores = in_threads(
        lambda: connect(0, 3, address, 30, listener=listener),
        *(lambda rank=rank: connect(rank, 3, address, 30) for rank in (1, 2)),
    )
    stores[0].set("word", "given")
    assert [store.get("word") for store in stores] == [b"given"] * 3


def test_others_may_come_before_rank_0(monkeypatch, reserved):
    refused, sleep = threading.Event(), time.sleep

    def pause(seconds):
        refused.set()
        sleep(seconds)

    monkeypatch.setattr(rendezvous.time, "sleep", pause)  # what rank 1 does between its tries

    def first():
        assert refused.wait(30)
        return connect(0, 2, reserved, 30)

    outcomes = in_threads(first, lambda: connect(1, 2, reserved, 30))
    assert not any(isinstance(outcome, Exception) for outcome in outcomes)


def test_an_address_where_nobody_listens_is_an_error_in_time(reserved):
    with pytest.raises(
        RendezvousError, match=rf"rank 1 could not reach rank 0 at {reserved} within 0\.3 s: .*refused"
    ):
        connect(1, 2, reserved, 0.3)
    with pytest.raises(RendezvousError, match=r"rank 1 could not reach rank 0 at nowhere\.invalid:1 within"):
        connect(1, 2, "nowhere.invalid:1", 0.1)


def test_a_listener_that_says_nothing_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(
            RendezvousError, match=rf"rank 1 reached {address}, but it is no rendezvous of rank 0"
        ):
            connect(1, 2, address, 0.5)


def test_a_port_that_is_taken_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousError, match=rf"rank 0 cannot listen at 127\.0\.0\.1:{port}: .*in use"):
            connect(0, 2, f"127.0.0.1:{port}", 5)
    with pytest.raises(RendezvousError, match=r"rank 0 cannot listen at 192\.0\.2\.1:\d+: "):
        connect(0, 2, f"192.0.2.1:{port}", 5)  # an address of no host (RFC 5737)


def test_rank_0_listens_on_the_given_address_only(reserved):
    store = connect(0, 1, reserved, 30)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", int(reserved.rpartition(":")[2])), timeout=5)
    del store


def test_ranks_that_came_for_something_else_are_told(reserved):
    purposes = ("Grid(tp=2)", "Grid(pp=2)")
    errors = in_threads(
        *(lambda rank=rank: connect(rank, 2, reserved, 30, purposes[rank]) for rank in range(2))
    )
    assert str(errors[0]).endswith("for Grid(tp=2), rank 1 for Grid(pp=2)")
    assert str(errors[1]).endswith("for Grid(pp=2), rank 0 for Grid(tp=2)")


def test_a_rank_that_is_lost_after_the_meeting_is_an_error_in_time(listener, address):
    _, error = in_threads(
        lambda: connect(1, 2, address, 30, purpose=f"{Grid(tp=2)} over gloo") and None,
        lambda: make_communicators(
            Grid(tp=2), 0, address=address, backend="gloo", timeout=2, listener=listener
        ),
    )
    assert isinstance(error, RendezvousError)
    assert str(error).startswith(f"rank 0 met the others at {address}, but could not make its gloo groups")
    assert not dist.is_initialized()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_nccl_groups_are_named_by_their_ranks_and_the_world_is_made_last(monkeypatch, reserved):
    joined = []

    class Joined(LocalCommunicator):
        def __init__(self, store, rank, size, *, device, name, timeout):
            assert store.get("arrived/0") == b"Grid(dp=1, pp=2, tp=2) over nccl"
            joined.append((name, rank, size, str(device), timeout))

    monkeypatch.setattr(rendezvous, "NcclCommunicator", Joined)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    grid = Grid(pp=2, tp=2)
    made, *_ = in_threads(
        lambda: make_communicators(grid, 3, address=reserved, backend="nccl", timeout=30),
        *(lambda rank=rank: connect(rank, 4, reserved, 30, f"{grid} over nccl") for rank in range(3)),
    )
    assert joined == [
        ("2,3", 1, 2, "cuda:5", 30),  # tp, and ep
        ("1,3", 1, 2, "cuda:5", 30),  # pp
        ("0,1,2,3", 3, 4, "cuda:5", 30),
    ]
    assert made.ep is made.tp


def test_a_grid_of_one_rank_meets_nobody():
    made = make_communicators(Grid(), 0, address="not looked at", backend="nccl", timeout=0)
    assert all(isinstance(comm, LocalCommunicator) for comm in made)
    made.close()


@pytest.mark.parametrize(
    "address", ["localhost", "localhost:", ":80", "localhost:0", "localhost:65536", "a:b"]
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ValueError, match=r"address must be host:port or \[host\]:port"):
        make_communicators(Grid(tp=2), 0, address=address, backend="gloo", timeout=1)


def test_what_is_no_rank_or_backend_is_refused():
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\)"):
        make_communicators(Grid(tp=2), 2, address="localhost:1", backend="gloo", timeout=1)
    with pytest.raises(ValueError, match="backend must be gloo or nccl, got 'mpi'"):
        make_communicators(Grid(tp=2), 0, address="localhost:1", backend="mpi", timeout=1)


def test_ipv6_addresses_are_written_in_brackets():
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6")
    with reserve("::1", socket.AF_INET6) as holder:
        assert connect(0, 1, f"[::1]:{holder.getsockname()[1]}", 30).num_keys() > 0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux")
def test_the_interface_is_that_of_the_route(monkeypatch):
    assert local_address("127.0.0.1", 1) == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(LookupError, match=r"no network interface of this host has 192\.0\.2\.1"):
        interface_of("192.0.2.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with gloo_interface("127.0.0.1", 1):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with gloo_interface("127.0.0.1", 1):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


@pytest.mark.slow
@pytest.mark.skipif(not can_make_hosts(), reason=WHY_NO_HOSTS)
def test_ranks_on_two_hosts_talk_over_the_interface_between_them():
    with two_hosts() as hosts:
        lines = run_ranks(
            60,
            f"{hosts[0].address}:29555",
            "1,1,3",
            ranks=range(3),
            prefix=lambda rank: hosts[0 if rank < 2 else 1].prefix,
        )
    assert [of_rank[0].get("tp") for of_rank in lines] == [
        {"members": [0, 1, 2], "rank": rank, "size": 3, "kind": "GlooCommunicator"} for rank in range(3)
    ], lines


@pytest.mark.slow
@pytest.mark.skipif(not can_make_hosts(), reason=WHY_NO_HOSTS)
def test_groups_within_a_host_share_memory_also_when_there_are_several_hosts():
    with two_hosts() as hosts:
        lines = run_ranks(
            60,
            f"{hosts[0].address}:29556",
            "1,2,2",
            ranks=range(4),
            prefix=lambda rank: hosts[rank // 2].prefix,
        )
    for [line] in lines:
        kinds = {axis: line[axis]["kind"] for axis in ("world", "tp", "pp")}
        assert kinds == {
            "world": "GlooCommunicator",
            "tp": "SharedMemoryCommunicator",
            "pp": "GlooCommunicator",
        }


def test_a_call_that_ends_in_time_gives_its_result_or_its_error():
    assert call_within(30, "adding", lambda: 1 + 1) == 2
    with pytest.raises(ZeroDivisionError):
        call_within(30, "dividing", lambda: 1 / 0)
    ended = threading.Event()
    with pytest.raises(TimeoutError, match=r"waiting did not end within 0\.05 s"):
        call_within(0.05, "waiting", ended.wait)
    ended.set()
