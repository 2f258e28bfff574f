"""Memory layout of a ring, its errors, and checks of whether the other process is alive.

    [ head | a line of state and two semaphores for each reader | ring of `capacity` bytes ]

In the ring lie frames, back to back: 16 bytes of header (bytes in this frame, whether it is a milestone,
bytes of the message still to follow) and the bytes, padded to a multiple of 16. A frame may go over the end
of the ring and on at its start. A message longer than a quarter of the ring travels as several frames.

For each reader, `filled` counts frames it has not read and `passed` counts milestones behind it, of which
there is one in every sixteenth of the ring, so that a writer who waits for room does not wake for every
frame. These semaphores are the only synchronisation: neither side reads memory that the other may still be
writing, on every processor (see `Semaphore`).
"""

import contextlib
import mmap
import os
import select
import struct
import time

from collectives.semaphore import SLOT

MAGIC = 0x4F435441564F5231
HEAD = struct.Struct("=QQQQ")
"""Magic number, readers, capacity, writer's process id."""
CLOSED_AT = 32
"""Offset in the head of the frame number at which the writer closed; `OPEN` before that."""
WORD = struct.Struct("=q")
OPEN = -1
LEFT = -1
"""Value of a reader's process id once it has left."""
FRAME = struct.Struct("=IIQ")

_GLANCE = 0.1
"""Seconds between checks of whether the other process is alive, while waiting for it."""


class RingError(RuntimeError):
    """The ring cannot be used any further."""


class PeerDied(RingError):
    """The process at the other end has ended, or has left the ring; the message names it."""


class RingClosed(RingError):
    """The writer has closed the ring, and everything written before was read."""


class RingTimeout(RingError, TimeoutError):
    """The other end did not write or read in time; the message names it."""


class Layout:
    """Byte offsets of the parts."""

    def __init__(self, readers: int, capacity: int) -> None:
        self.attached = SLOT
        self.data = SLOT * (2 + 3 * readers)
        self.size = self.data + capacity

    def pid(self, reader: int) -> int:
        return SLOT * (2 + 3 * reader)

    def filled(self, reader: int) -> int:
        return self.pid(reader) + SLOT

    def passed(self, reader: int) -> int:
        return self.pid(reader) + 2 * SLOT


class Peer:
    """Another process, by a pidfd: a later process with the same id is not mistaken for it."""

    def __init__(self, pid: int) -> None:
        self._ended = select.poll()
        self._descriptor: int | None = None
        with contextlib.suppress(ProcessLookupError):
            self._descriptor = os.pidfd_open(pid)
            self._ended.register(self._descriptor, select.POLLIN)

    @property
    def alive(self) -> bool:
        return self._descriptor is not None and not self._ended.poll(0)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Deadline:
    """A point in time `timeout` seconds from now; never if that is None."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._end = float("inf") if timeout is None else time.monotonic() + timeout

    @property
    def glance(self) -> float:
        """Seconds to wait before the next check of the other process."""
        return min(_GLANCE, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end


def frame_size(length: int) -> int:
    """Return the size in the ring of a frame of `length` bytes."""
    return FRAME.size + padded(length)


def padded(length: int) -> int:
    """Return `length` rounded up so that no header wraps around the ring's end."""
    return -(-length // FRAME.size) * FRAME.size


def unmap(memory: mmap.mmap) -> None:
    """Unmap memory: now, or once no traceback of an error refers to a semaphore in it."""
    with contextlib.suppress(BufferError):
        memory.close()
