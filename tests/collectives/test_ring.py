"""`RingBroadcast`: every reader gets every message, and nobody waits for the dead."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from collectives.ring import PeerDied, RingBroadcast, RingClosed, RingError, RingReader, RingTimeout

fork = multiprocessing.get_context("fork")
BENCH = Path(__file__).parents[2] / "tools" / "bench" / "ring.py"


def start(function, *arguments):
    """Run a function in a process of its own."""
    process = fork.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def kill(process):
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def messages(seed, count, longest):
    """The same messages for everybody with the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        yield rng.randbytes(int(longest * rng.random() ** 3))


def read_all(address, reader, seed, count, longest, result):
    ring = RingReader(address, reader)
    expected = messages(seed, count, longest)
    pauses = random.Random(reader)
    for message in expected:
        if pauses.random() < 0.01:
            time.sleep(0.001 * pauses.random())  # an uneven reader, not a wait for anything
        if ring.read(timeout=30) != message:
            result.send("a message differs")
            return
    try:
        ring.read(timeout=30)
    except RingClosed:
        result.send("all")


@pytest.mark.parametrize(("capacity", "longest"), [(1024, 5000), (4096, 1500), (1 << 20, 60_000)])
def test_every_reader_gets_every_message(capacity, longest):
    readers, count = 3, 3000
    ring = RingBroadcast(readers, capacity)
    results = []
    for reader in range(readers):
        here, there = fork.Pipe(duplex=False)
        results.append(here)
        start(read_all, ring.address, reader, 7, count, longest, there)
    ring.wait_for_readers(timeout=30)
    for message in messages(7, count, longest):
        ring.write(message, timeout=30)
    ring.close()
    assert [result.recv() for result in results] == ["all"] * readers


class Model(RuleBasedStateMachine):
    """A ring and its readers in one process, beside a queue for each reader."""

    CAPACITY = 1024

    def __init__(self):
        super().__init__()
        self.ring = RingBroadcast(2, self.CAPACITY)
        self.readers = [RingReader(self.ring.address, i) for i in range(2)]
        self.queues = [deque(), deque()]
        self.count = 0

    def used(self, queue):
        return sum(16 + -(-len(message) // 16) * 16 for message in queue)

    @rule(size=st.integers(0, 256))
    def write(self, size):
        message = bytes([self.count % 256]) * size
        needed = max(map(self.used, self.queues)) + 16 + -(-size // 16) * 16
        try:
            self.ring.write(message, timeout=0)
        except RingTimeout as error:
            # What lies behind no milestone yet is up to a sixteenth.
            assert needed > self.CAPACITY * 15 / 16
            assert "of the ring (process" in str(error)
        else:
            assert needed <= self.CAPACITY
            self.count += 1
            for queue in self.queues:
                queue.append(message)

    @rule(reader=st.integers(0, 1))
    def read(self, reader):
        if self.queues[reader]:
            assert self.readers[reader].read(timeout=0) == self.queues[reader].popleft()
        else:
            with pytest.raises(RingTimeout, match="sent nothing"):
                self.readers[reader].read(timeout=0)

    @precondition(lambda self: self.count > 20)
    @rule()
    def leave_nothing(self):
        for reader, queue in enumerate(self.queues):
            while queue:
                assert self.readers[reader].read(timeout=0) == queue.popleft()

    def teardown(self):
        self.ring.close()
        for reader, queue in zip(self.readers, self.queues, strict=True):
            for message in queue:
                assert reader.read(timeout=0) == message
            for _ in range(2):
                with pytest.raises(RingClosed):
                    reader.read()
            reader.close()


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_a_slow_reader_is_waited_for_then_named():
    ring = RingBroadcast(2, 1024)
    quick, slow = (RingReader(ring.address, i) for i in range(2))
    for _ in range(4):
        ring.write(b"x" * 200)
        assert quick.read() == b"x" * 200
    with pytest.raises(
        RingTimeout, match=rf"reader 1 .*process {os.getpid()}.* within 0.05 s .* for 224 more .* 896 of 1024"
    ):
        ring.write(b"y" * 200, timeout=0.05)
    assert slow.read() == b"x" * 200
    ring.write(b"y" * 200, timeout=0)  # nothing of the first try is left
    assert quick.read() == b"y" * 200
    assert [slow.read() for _ in range(4)] == [b"x" * 200] * 3 + [b"y" * 200]


def test_a_message_cut_off_by_a_timeout_ends_the_ring():
    ring = RingBroadcast(1, 1024)
    reader = RingReader(ring.address, 0)
    with pytest.raises(RingTimeout):
        ring.write(bytes(5000), timeout=0.01)
    with pytest.raises(RingError, match="cut off"):
        ring.write(b"next")
    with pytest.raises(RingTimeout):
        reader.read(timeout=0.01)


def attend(address, reader):
    ring = RingReader(address, reader)
    while True:
        ring.read()


def test_a_dead_reader_is_named():
    ring = RingBroadcast(2, 4096)
    processes = [start(attend, ring.address, i) for i in range(2)]
    ring.wait_for_readers(timeout=30)
    ring.wait_for_readers(timeout=0)
    kill(processes[1])
    with pytest.raises(PeerDied, match=rf"reader 1 .*process {processes[1].pid}.* has ended"):
        while True:
            ring.write(bytes(1000), timeout=30)
    kill(processes[0])


def test_a_reader_that_left_is_named():
    ring = RingBroadcast(1, 1024)
    RingReader(ring.address, 0).close()
    with pytest.raises(PeerDied, match="reader 0 of the ring has left"):
        ring.write(bytes(5000))


def write_two_and_wait(pipe):
    ring = RingBroadcast(1)
    pipe.send(ring.address)
    ring.write(b"one")
    ring.write(b"two")
    pipe.send("written")
    with suppress(EOFError):
        pipe.recv()


def test_a_dead_writer_is_named_after_what_it_wrote():
    here, there = fork.Pipe()
    writer = start(write_two_and_wait, there)
    reader = RingReader(here.recv(), 0)
    assert here.recv() == "written"
    kill(writer)
    assert [reader.read(), reader.read()] == [b"one", b"two"]
    with pytest.raises(PeerDied, match=rf"writer .*process {writer.pid}.* has ended"):
        reader.read()


def test_waiting_costs_nothing():
    ring = RingBroadcast(1)
    reader = RingReader(ring.address, 0)
    begin = time.process_time()
    with pytest.raises(RingTimeout, match="nothing within 1 s"):
        reader.read(timeout=1)
    assert time.process_time() - begin < 0.05


def test_a_missing_reader_is_named():
    ring = RingBroadcast(3)
    RingReader(ring.address, 1)
    with pytest.raises(RingTimeout, match=r"readers \[0, 2\] did not come"):
        ring.wait_for_readers(timeout=0.01)


def test_what_is_no_place_in_a_ring(tmp_path):
    ring = RingBroadcast(2)
    first = RingReader(ring.address, 0)
    with pytest.raises(ValueError, match=f"process {os.getpid()} is or was reader 0"):
        RingReader(ring.address, 0)
    with pytest.raises(ValueError, match=r"reader must be in \[0, 2\), got 2"):
        RingReader(ring.address, 2)
    other = tmp_path / "file"
    for content in (b"", bytes(4096)):
        other.write_bytes(content)
        with pytest.raises(ValueError, match="not a ring"):
            RingReader(str(other), 0)
    with pytest.raises(ValueError, match="got 0 and"):
        RingBroadcast(0)
    address = ring.address
    ring.close()
    ring.close()
    first.close()
    for broken in (lambda: ring.write(b""), first.read):
        with pytest.raises(RingError, match="closed"):
            broken()
    with pytest.raises(FileNotFoundError):
        RingReader(address, 1)


def test_the_bench_in_short(tmp_path):
    figures = tmp_path / "figures.json"
    command = [sys.executable, BENCH, "--messages", "1000", "--json", figures]
    subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL)
    found = json.loads(figures.read_text())
    assert set(found) >= {"ring", "zmq"}
    assert all(found[way]["messages_per_s"] > 0 for way in ("ring", "zmq"))
