"""Measure the coordinator with fake ranks and front-ends: messages a second, CPU time a message, snapshots.

uv run python tools/bench/coordinator.py --ranks 1000 --frontends 100 --rate 10000

The coordinator is the real process. What tells it one rank from another is the connection, so each fake rank
has one, of a socket that does nothing else; two processes hold all of these and send their reports in turn. A
front-end is a socket that reads snapshots; one process holds them all.
"""

import argparse
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.synchronize import Event

import msgspec
import numpy as np
import psutil
import zmq

from enginecore.codec import Decoder, Encoder
from enginecore.data_parallel.connection import prepare
from enginecore.data_parallel.coordinator_process import CoordinatorPorts, CoordinatorSettings
from enginecore.data_parallel.link import ask_status
from enginecore.data_parallel.messages import CoordinatorAddress, LoadReport, RegisterRank, Snapshot, Status
from enginecore.data_parallel.routing import RankLoads, choose

_REGISTER_SECONDS = 3.0
_SENDERS = 2


def send_reports(address: CoordinatorAddress, ranks: range, rate: float, started: Event, stop: Event) -> None:
    """Register `ranks`, then send `rate` load reports a second, each of the next rank in turn."""
    context, encoder = zmq.Context(), Encoder()
    sockets = []
    for rank in ranks:
        socket = context.socket(zmq.DEALER)
        prepare(socket, address.key)
        socket.connect(address.reports)
        socket.send(encoder.encode(RegisterRank(rank, len(ranks), 0, 25_000, 256)))
        sockets.append(socket)
    started.wait()
    began, sent = time.monotonic(), 0
    while not stop.is_set():
        due = min(int((time.monotonic() - began) * rate), sent + 100)
        for number in range(sent, due):
            index = number % len(ranks)
            report = LoadReport(
                ranks[index],
                time.monotonic(),
                number % 7,
                number % 200,
                number % 25_000,
                number,
                0.02,
                number,
            )
            sockets[index].send(encoder.encode(report))
        sent = max(due, sent)
        time.sleep(0.001)
    context.destroy(linger=0)


def read_snapshots(address: CoordinatorAddress, frontends: int, started: Event, stop: Event) -> None:
    """Listen as many front-ends, and read all that comes."""
    context = zmq.Context()
    poller = zmq.Poller()
    for _ in range(frontends):
        socket = context.socket(zmq.SUB)
        prepare(socket, address.key)
        socket.subscribe(b"")
        socket.connect(address.snapshots)
        poller.register(socket, zmq.POLLIN)
    started.wait()
    while not stop.is_set():
        for socket, _ in poller.poll(100):
            socket.recv()
    context.destroy(linger=0)


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Run the coordinator under load and return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "enginecore.data_parallel.coordinator_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None and process.stdout is not None
        address = CoordinatorAddress(f"ipc://{folder}/r", f"ipc://{folder}/s")
        process.stdin.write(msgspec.json.encode(CoordinatorSettings(address)) + b"\n")
        process.stdin.flush()
        msgspec.json.decode(process.stdout.readline(), type=CoordinatorPorts)
        try:
            return _under_load(options, psutil.Process(process.pid), address)
        finally:
            process.stdin.close()
            process.wait()


def _under_load(
    options: argparse.Namespace, process: psutil.Process, address: CoordinatorAddress
) -> dict[str, float]:
    spawn = multiprocessing.get_context("spawn")
    started, stop = spawn.Event(), spawn.Event()
    share = options.ranks // _SENDERS
    children = [
        spawn.Process(
            target=send_reports,
            args=(address, range(n * share, (n + 1) * share), options.rate / _SENDERS, started, stop),
        )
        for n in range(_SENDERS)
    ]
    if options.frontends:
        children.append(
            spawn.Process(target=read_snapshots, args=(address, options.frontends, started, stop))
        )
    for child in children:
        child.start()
    deadline = time.monotonic() + 60
    while len(_status(address).ranks) < share * _SENDERS:
        if time.monotonic() > deadline:
            raise SystemExit("the ranks did not register within a minute")
        time.sleep(0.1)
    started.set()
    time.sleep(_REGISTER_SECONDS)
    before, cpu_before, began = _status(address), process.cpu_times(), time.monotonic()
    time.sleep(options.seconds)
    after, cpu_after, seconds = _status(address), process.cpu_times(), time.monotonic() - began
    stop.set()
    for child in children:
        child.join()
    cpu = cpu_after.user + cpu_after.system - cpu_before.user - cpu_before.system
    messages = after.messages - before.messages
    return {
        "messages a second": messages / seconds,
        "CPU, share of a core": cpu / seconds,
        "CPU a message, snapshots included, µs": 1e6 * cpu / messages if messages else float("nan"),
        "snapshots a second": (after.snapshots - before.snapshots) / seconds,
        "bytes of a snapshot": snapshot_bytes(share * _SENDERS),
        "memory, MB": process.memory_info().rss / 1e6,
    }


def _status(address: CoordinatorAddress) -> Status:
    status = ask_status(address, timeout=30)
    if status is None:
        raise SystemExit("the coordinator does not answer")
    return status


def snapshot_bytes(ranks: int) -> int:
    """Return the encoded size of a snapshot."""
    column, ages = np.zeros(ranks, np.int32), np.zeros(ranks, np.float32)
    snapshot = Snapshot(1.5, column, column, ages, column, column, column, column)
    data = Encoder().encode(snapshot)
    assert len(Decoder[Snapshot](Snapshot).decode(data).ranks) == ranks
    return len(data)


def choice_microseconds(ranks: int, *, prefixes: bool) -> float:
    """Return the time of one choice among so many ranks, the median of several runs."""
    numbers = np.random.default_rng(0)
    loads = RankLoads(
        np.ones(ranks, np.bool_),
        *(numbers.integers(0, 50, ranks) for _ in range(3)),
        numbers.integers(0, 25_000, ranks),
        np.full(ranks, 25_000),
    )
    cached = numbers.integers(0, 5000, ranks) if prefixes else None
    times = []
    for _ in range(15):
        began = time.perf_counter()
        for turn in range(200):
            choose(loads, turn, cached)
        times.append((time.perf_counter() - began) / 200)
    return 1e6 * statistics.median(times)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--frontends", type=int, default=100)
    parser.add_argument("--rate", type=float, default=10_000, help="reports a second, of all ranks together")
    parser.add_argument("--seconds", type=float, default=5)
    options = parser.parse_args()
    for name, figure in measure(options).items():
        print(f"{name:38} {figure:12,.2f}")
    for ranks in (8, 64, 1000):
        plain, cached = (choice_microseconds(ranks, prefixes=prefixes) for prefixes in (False, True))
        print(f"a choice among {ranks:4} ranks {plain:6.1f} µs, with prefixes {cached:6.1f} µs")


if __name__ == "__main__":
    main()
