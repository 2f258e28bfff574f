"""What the two ends of a ring share: how its memory is laid out, and how they mind each other.

    [ head | a line of state and two semaphores for each reader | ring of `capacity` bytes ]

In the ring lie frames, back to back: 16 bytes of header (bytes in this frame, whether it is a milestone,
bytes of the message still to follow) and the bytes, padded to a multiple of 16. A frame may go over the end
of the ring and on at its start. A message longer than a quarter of the ring travels as several frames.

For each reader, `filled` counts frames it has not read and `passed` counts milestones behind it, of which
there is one in every sixteenth of the ring, so that a writer who waits for room does not wake for every
frame. The two are all that tells one side of the other, so that neither looks at memory that the other
still writes: see `Semaphore` for why that holds on every processor.
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
"""Where the head says at which frame the writer closed; `OPEN` before."""
WORD = struct.Struct("=q")
OPEN = -1
LEFT = -1
"""In the place of a reader's process id: it has left."""
FRAME = struct.Struct("=IIQ")

_GLANCE = 0.1
"""Seconds between looks at whether the other side still lives, while waiting for it."""


class RingError(RuntimeError):
    """The ring cannot be used any further."""


class PeerDied(RingError):
    """The process at the other end has ended, or has left the ring; the message names it."""


class RingClosed(RingError):
    """The writer has closed the ring, and everything written before was read."""


class RingTimeout(RingError, TimeoutError):
    """The other end did not do its part in time; the message names it."""


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
    """Another process, told from any later one with the same number."""

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
    """When to give up, `timeout` seconds from now; never if it is None."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._end = float("inf") if timeout is None else time.monotonic() + timeout

    @property
    def glance(self) -> float:
        """Seconds to wait before the next look at the other side."""
        return min(_GLANCE, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end


def frame_size(length: int) -> int:
    """Bytes that a frame of `length` bytes takes."""
    return FRAME.size + padded(length)


def padded(length: int) -> int:
    """`length` rounded up so that the next header never goes over the ring's end."""
    return -(-length // FRAME.size) * FRAME.size


def unmap(memory: mmap.mmap) -> None:
    """Give memory back: now, or when the traceback of an error no longer holds a semaphore in it."""
    with contextlib.suppress(BufferError):
        memory.close()
