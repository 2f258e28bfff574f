"""Benchmark of broadcasts to several processes: `RingBroadcast` beside ZMQ PUB/SUB over ipc.

    uv run python tools/bench/ring.py [--messages 100000] [--readers 4] [--json PATH]

The same messages of 2 to 64 KiB, as long as plans of steps are, go from one process to `--readers` others,
first as fast as they take them, for the throughput; then one at a time, each when all have answered the last
one, for the latency: from before the message is written until a reader has it as bytes.
"""

import argparse
import contextlib
import gc
import json
import multiprocessing
import random
import struct
import tempfile
import time
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import zmq

from collectives.ring import RingBroadcast, RingReader

SHORTEST, LONGEST = 2 << 10, 64 << 10
DISTINCT = 512
"""Messages that are sent again and again; together they are more than a processor's caches hold."""
ROUNDS = 300
"""Messages whose latency is taken."""
_STAMP = struct.Struct("=Q")
fork = multiprocessing.get_context("fork")


class Figures(NamedTuple):
    """Of one way of telling."""

    messages_per_s: float
    gib_per_s: float
    """Payload, counted once, however many readers there are."""
    latency_us: float
    """Median over messages and readers."""
    latency_p99_us: float


class Sender(Protocol):
    """The writing end."""

    @property
    def address(self) -> str: ...

    def write(self, message: bytes) -> None: ...

    def close(self) -> None: ...


class ZmqSender:
    """PUB over ipc that drops nothing."""

    def __init__(self, folder: str, readers: int) -> None:
        self.address = f"ipc://{folder}/bench"
        self._socket = zmq.Context.instance().socket(zmq.XPUB)
        self._socket.setsockopt(zmq.SNDHWM, 1000)
        # Waits for slow readers rather than drop their messages.
        self._socket.setsockopt(zmq.XPUB_NODROP, 1)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # tells of every reader, not of the first alone
        self._socket.bind(self.address)
        self._readers = readers

    def wait_for_readers(self) -> None:
        for _ in range(self._readers):
            self._socket.recv()

    def write(self, message: bytes) -> None:
        self._socket.send(message)

    def close(self) -> None:
        self._socket.close(linger=0)


def read_ring(address: str, reader: int) -> Callable[[], bytes]:
    return RingReader(address, reader).read


def read_zmq(address: str, reader: int) -> Callable[[], bytes]:
    socket = zmq.Context().socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(address)
    return socket.recv


Attach = Callable[[str, int], Callable[[], bytes]]


def reader_process(attach: Attach, address: str, reader: int, count: int, results: Connection) -> None:
    """Read `count` messages, tell how many bytes they had, then answer `ROUNDS` with their latencies."""
    read = attach(address, reader)
    total = sum(len(read()) for _ in range(count))
    results.send((time.monotonic_ns(), total))
    for _ in range(ROUNDS):
        message = read()
        now = time.monotonic_ns()
        results.send(now - _STAMP.unpack_from(message)[0])


@contextlib.contextmanager
def started(attach: Attach, address: str, readers: int, count: int) -> Generator[list[Connection]]:
    """The ends of pipes on which the readers answer."""
    ends, processes = [], []
    for reader in range(readers):
        here, there = fork.Pipe(duplex=False)
        process = fork.Process(
            target=reader_process, args=(attach, address, reader, count, there), daemon=True
        )
        process.start()
        there.close()
        ends.append(here)
        processes.append(process)
    try:
        yield ends
    finally:
        for process in processes:
            process.kill()
            process.join()


def plans(seed: int) -> list[bytes]:
    """Lengths evenly spread in their logarithm: most steps change little."""
    rng = random.Random(seed)
    lengths = [int(SHORTEST * (LONGEST / SHORTEST) ** rng.random()) for _ in range(DISTINCT)]
    return [rng.randbytes(length) for length in lengths]


def measure(sender: Sender, ready: Callable[[], None], attach: Attach, readers: int, count: int) -> Figures:
    messages = plans(0)
    with started(attach, sender.address, readers, count) as ends:
        ready()
        gc.disable()
        begin = time.monotonic_ns()
        for i in range(count):
            sender.write(messages[i % DISTINCT])
        answers = [end.recv() for end in ends]
        sent = sum(len(messages[i % DISTINCT]) for i in range(count))
        if any(total != sent for _, total in answers):
            raise RuntimeError("a reader missed a message")
        seconds = (max(at for at, _ in answers) - begin) / 1e9
        latencies = []
        for i in range(ROUNDS):
            body = messages[i % DISTINCT][_STAMP.size :]
            sender.write(_STAMP.pack(time.monotonic_ns()) + body)
            latencies += [end.recv() for end in ends]
        gc.enable()
    sender.close()
    median, high = np.percentile(latencies, [50, 99]) / 1e3
    return Figures(count / seconds, sent / seconds / 2**30, float(median), float(high))


def measure_ring(readers: int, count: int) -> Figures:
    ring = RingBroadcast(readers)
    return measure(ring, ring.wait_for_readers, read_ring, readers, count)


def measure_zmq(readers: int, count: int) -> Figures:
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        sender = ZmqSender(folder, readers)
        return measure(sender, sender.wait_for_readers, read_zmq, readers, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there")
    arguments = parser.parse_args()
    ring = measure_ring(arguments.readers, arguments.messages)
    theirs = measure_zmq(arguments.readers, arguments.messages)
    if arguments.json:
        figures = {"ring": ring._asdict(), "zmq": theirs._asdict()}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"{'':<18}{'ring':>12}{'ZMQ':>12}{'ratio':>9}")
    for name in Figures._fields:
        mine, other = getattr(ring, name), getattr(theirs, name)
        ratio = other / mine if name.startswith("latency") else mine / other
        print(f"{name:<18}{mine:>12,.2f}{other:>12,.2f}{ratio:>8.1f}x")


if __name__ == "__main__":
    main()
