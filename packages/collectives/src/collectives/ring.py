"""Broadcast from one process to others of a host: a byte ring in shared memory, with a position per reader.

The writer copies a message in once, and each reader copies it out once; see `ring_memory` for the layout.
"""

import mmap
import os
from collections import deque

from collectives.ring_memory import (
    CLOSED_AT,
    FRAME,
    HEAD,
    LEFT,
    MAGIC,
    OPEN,
    WORD,
    Deadline,
    Layout,
    Peer,
    PeerDied,
    RingClosed,
    RingError,
    RingTimeout,
    frame_size,
    padded,
    unmap,
)
from collectives.semaphore import SLOT, Semaphore

__all__ = ["PeerDied", "RingBroadcast", "RingClosed", "RingError", "RingReader", "RingTimeout"]


class RingBroadcast:
    """The writing end of a ring for a fixed number of readers on the same host.

    Every reader gets every message, whole and in order: a full ring blocks the writer until the slowest
    reader has caught up. The memory is a memfd: it is freed with the last process that maps it, however that
    ends, and does not count against /dev/shm. One thread at a time.
    """

    def __init__(self, readers: int, capacity: int = 16 << 20) -> None:
        """Make a ring of `capacity` bytes, rounded up to a multiple of 16.

        Raises ValueError for less than one reader or less than 1 KiB.
        """
        if readers < 1 or capacity < 1024:
            raise ValueError(f"a ring needs 1 reader and 1024 bytes at least, got {readers} and {capacity}")
        self._capacity = capacity = padded(capacity)
        self._longest = padded(capacity // 4)
        self._stretch = capacity // 16
        layout = self._layout = Layout(readers, capacity)
        self._descriptor = os.memfd_create("ring")
        os.ftruncate(self._descriptor, layout.size)
        memory = self._memory = mmap.mmap(self._descriptor, layout.size)
        self._data = memoryview(memory)[layout.data :]
        self._attached = Semaphore(memory, layout.attached, create=True)
        self._filled = [Semaphore(memory, layout.filled(i), create=True) for i in range(readers)]
        self._passed = [Semaphore(memory, layout.passed(i), create=True) for i in range(readers)]
        WORD.pack_into(memory, CLOSED_AT, OPEN)
        HEAD.pack_into(memory, 0, MAGIC, readers, capacity, os.getpid())
        self._peers: dict[int, Peer] = {}
        self._behind = [0] * readers
        """Number of milestones that each reader has passed."""
        self._milestones: deque[int] = deque()
        """Positions of the milestones that some reader has not passed."""
        self._all_passed = 0
        self._head = self._tail = self._last_milestone = self._frames = self._arrived = 0
        self._torn = self._closed = False

    @property
    def address(self) -> str:
        """The argument of a `RingReader` in a process of the same user, valid while this ring is open."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def wait_for_readers(self, timeout: float | None = None) -> None:
        """Wait until every reader has attached. RingTimeout names those missing after `timeout` seconds."""
        deadline = Deadline(timeout)
        while self._arrived < len(self._behind):
            if self._attached.wait(deadline.glance):
                self._arrived += 1
                continue
            self._check_readers()
            if deadline.over:
                absent = [i for i in range(len(self._behind)) if not self._pid(i)]
                raise RingTimeout(f"readers {absent} did not come to the ring within {deadline.timeout:g} s")

    def write(self, message: bytes | bytearray | memoryview, timeout: float | None = None) -> None:
        """Send a message of any length to every reader, waiting while the ring is full.

        Raises:
            RingTimeout: there was no room within `timeout` seconds; the message names the slowest reader.
            PeerDied: there is no room, and a reader that should have made some has ended or left.
            RingError: the ring is closed, or an error cut an earlier message off after its first part.
        """
        if self._closed or self._torn:
            raise RingError("the ring is closed" if self._closed else "the last message was cut off")
        deadline = Deadline(timeout)
        rest = memoryview(message).cast("B")
        size = len(rest)
        while True:
            part, rest = rest[: self._longest], rest[self._longest :]
            try:
                self._make_room(frame_size(len(part)), deadline)
            except BaseException:
                self._torn = len(part) + len(rest) < size
                raise
            self._put(part, len(rest))
            if not rest:
                return

    def close(self) -> None:
        """Close: readers get what is written, then RingClosed. Unmaps the memory."""
        if self._closed:
            return
        self._closed = True
        WORD.pack_into(self._memory, CLOSED_AT, self._frames)
        self._tell_readers()
        self._data.release()
        del self._attached, self._filled, self._passed
        unmap(self._memory)
        os.close(self._descriptor)
        for peer in self._peers.values():
            peer.close()

    def _put(self, part: memoryview, rest: int) -> None:
        at = self._head % self._capacity
        self._head += frame_size(len(part))
        milestone = self._head - self._last_milestone >= self._stretch
        FRAME.pack_into(self._data, at, len(part), milestone, rest)
        at = (at + FRAME.size) % self._capacity
        before_end = min(len(part), self._capacity - at)
        self._data[at : at + before_end] = part[:before_end]
        if before_end < len(part):
            self._data[: len(part) - before_end] = part[before_end:]
        if milestone:
            self._last_milestone = self._head
            self._milestones.append(self._head)
        self._frames += 1
        self._tell_readers()

    def _tell_readers(self) -> None:
        for filled in self._filled:
            filled.post()

    def _make_room(self, needed: int, deadline: Deadline) -> None:
        while self._head + needed - self._tail > self._capacity:
            slowest = self._count_passed()
            if self._head + needed - self._tail <= self._capacity:
                return
            if self._passed[slowest].wait(deadline.glance):
                self._behind[slowest] += 1
                continue
            self._check_readers()
            if deadline.over:
                raise RingTimeout(
                    f"{self._named(slowest)} is slow: within {deadline.timeout:g} s it made no room "
                    f"for {needed} more bytes, with {self._head - self._tail} of {self._capacity} in use"
                )

    def _count_passed(self) -> int:
        """Free the space that every reader has passed, and return the slowest reader."""
        for reader, passed in enumerate(self._passed):
            while passed.try_wait():
                self._behind[reader] += 1
        slowest = min(range(len(self._behind)), key=self._behind.__getitem__)
        while self._all_passed < self._behind[slowest]:
            self._all_passed += 1
            self._tail = self._milestones.popleft()
        return slowest

    def _check_readers(self) -> None:
        for reader in range(len(self._behind)):
            pid = self._pid(reader)
            if pid == LEFT:
                raise PeerDied(f"reader {reader} of the ring has left it")
            if pid and reader not in self._peers:
                self._peers[reader] = Peer(pid)
            if pid and not self._peers[reader].alive:
                raise PeerDied(f"{self._named(reader)} has ended")

    def _pid(self, reader: int) -> int:
        return WORD.unpack_from(self._memory, self._layout.pid(reader))[0]

    def _named(self, reader: int) -> str:
        return f"reader {reader} of the ring (process {self._pid(reader) or 'not there yet'})"


class RingReader:
    """One reader's end of a `RingBroadcast`. One thread at a time."""

    def __init__(self, address: str, reader: int) -> None:
        """Attach as reader number `reader`.

        Raises FileNotFoundError when there is nothing at `address`, ValueError when it is no ring, has no
        such reader, or that reader is attached already.
        """
        descriptor = os.open(address, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            memory = mmap.mmap(descriptor, size) if size >= SLOT else None
        finally:
            os.close(descriptor)
        magic, readers, capacity, writer = (0, 0, 0, 0) if memory is None else HEAD.unpack_from(memory)
        if memory is None or magic != MAGIC:
            raise ValueError(f"{address} is not a ring")
        layout = self._layout = Layout(readers, capacity)
        if not 0 <= reader < readers:
            raise ValueError(f"reader must be in [0, {readers}), got {reader}")
        (taken,) = WORD.unpack_from(memory, layout.pid(reader))
        if taken:
            raise ValueError(f"process {taken} is or was reader {reader} of the ring already")
        self._reader, self._memory, self._capacity = reader, memory, capacity
        self._data = memoryview(memory)[layout.data :]
        self._filled = Semaphore(memory, layout.filled(reader), create=False)
        self._passed = Semaphore(memory, layout.passed(reader), create=False)
        self._writer, self._writer_pid = Peer(writer), writer
        self._head = self._frames = 0
        self._parts: list[bytes] = []
        self._ended = self._closed = False
        WORD.pack_into(memory, layout.pid(reader), os.getpid())
        Semaphore(memory, layout.attached, create=False).post()

    def read(self, timeout: float | None = None) -> bytes:
        """Return the next message, waiting for it.

        Raises:
            RingTimeout: none was complete within `timeout` seconds; a later call may get it.
            RingClosed: the writer closed the ring, and this was all.
            PeerDied: the writer has ended, and this was all.
            RingError: this end is closed.
        """
        if self._closed:
            raise RingError("this end of the ring is closed")
        deadline = Deadline(timeout)
        rest = 1
        while rest:
            self._await_frame(deadline)
            part, rest = self._take()
            self._parts.append(part)
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Detach; the writer gets PeerDied once it would have to wait for this reader."""
        if self._closed:
            return
        self._closed = True
        WORD.pack_into(self._memory, self._layout.pid(self._reader), LEFT)
        self._data.release()
        del self._filled, self._passed
        unmap(self._memory)
        self._writer.close()

    def _take(self) -> tuple[bytes, int]:
        at = self._head % self._capacity
        size, milestone, rest = FRAME.unpack_from(self._data, at)
        at = (at + FRAME.size) % self._capacity
        before_end = min(size, self._capacity - at)
        part = bytes(self._data[at : at + before_end])
        if before_end < size:
            part += self._data[: size - before_end]
        self._head += frame_size(size)
        self._frames += 1
        if milestone:
            self._passed.post()
        return part, rest

    def _await_frame(self, deadline: Deadline) -> None:
        while not self._ended and not self._filled.wait(deadline.glance):
            alive = self._writer.alive
            # Looked at after that: to fill may have been the writer's last act.
            if self._filled.try_wait():
                break
            if not alive:
                raise PeerDied(f"the writer of the ring (process {self._writer_pid}) has ended")
            if deadline.over:
                raise RingTimeout(f"the writer of the ring sent nothing within {deadline.timeout:g} s")
        if self._ended or WORD.unpack_from(self._memory, CLOSED_AT)[0] == self._frames:
            self._ended = True
            raise RingClosed("the writer has closed the ring")
