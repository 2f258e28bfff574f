"""POSIX semaphores in shared memory: counting, blocking and memory ordering between processes."""

import ctypes
import errno
import mmap
import os
import time

SLOT = 64
"""Bytes a semaphore takes: more than any libc's sem_t, and a cache line, so that two never share one."""

_SPINS = 10
"""Tries before sleeping, a few µs in all; between them the processor is offered to others."""

_blocking = ctypes.CDLL(None, use_errno=True)
# Calls that never block keep the interpreter lock, which is cheaper than to give it up and take it again.
_quick = ctypes.PyDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class Semaphore:
    """A counting semaphore (sem_t) shared by all processes that map the memory.

    POSIX lists sem_post and the calls that wait among those that synchronise memory (Base Definitions, 4.12):
    all that a process wrote before `post` is seen by the one whose wait that ends, on processors with strong
    (x86) and weak (ARM) ordering of stores. Linux only.
    """

    __slots__ = ("_memory",)

    def __init__(self, memory: mmap.mmap, offset: int, *, create: bool) -> None:
        """Use `SLOT` bytes of `memory` at `offset`, a multiple of `SLOT`; `create` sets the counter to 0."""
        self._memory = (ctypes.c_char * SLOT).from_buffer(memory, offset)
        if create and _quick.sem_init(self._memory, 1, 0):
            raise _error("sem_init")

    def post(self) -> None:
        """Increment the counter, and wake one waiter."""
        if _quick.sem_post(self._memory):
            raise _error("sem_post")

    def try_wait(self) -> bool:
        """Decrement the counter if it is above 0; return whether it was."""
        return _quick.sem_trywait(self._memory) == 0

    def wait(self, seconds: float) -> bool:
        """Decrement the counter, waiting up to `seconds` for it to be above 0; return whether it was.

        A signal's Python handler runs during the wait, and may end it by raising.
        """
        for _ in range(_SPINS):
            if self.try_wait():
                return True
            os.sched_yield()
        nanoseconds = time.clock_gettime_ns(time.CLOCK_REALTIME) + int(max(0.0, seconds) * 1e9)
        until = _Timespec(*divmod(nanoseconds, 10**9))
        while _blocking.sem_timedwait(self._memory, ctypes.byref(until)):
            failed = ctypes.get_errno()
            if failed == errno.ETIMEDOUT:
                return False
            if failed != errno.EINTR:
                raise _error("sem_timedwait")
        return True


def _error(call: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{call}: {os.strerror(code)}")
