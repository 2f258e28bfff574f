"""Shared memory of a group of ranks on one host, and its synchronisation.

    [ head | each rank's process id | semaphores for each pair of ranks | slots | channels ]

Each rank has two slots, which all ranks read (collectives), and to each other rank a channel of two buffers
(point to point). Slots and buffers are `CHUNK` bytes. Pages that are never written take no memory.

Slots are used in turn, one each round: see `meet` for why two are enough. There is a semaphore for each pair,
so that a wait names the rank waited for; they order memory on every processor, see `Semaphore`.
"""

import mmap
import os
import struct

import torch
from torch import Tensor

from collectives.ring_memory import LEFT, WORD, Deadline, Peer, unmap
from collectives.semaphore import SLOT, Semaphore

CHUNK = 1 << 19
"""Bytes of a piece: a few fit the cache of a core together."""

_MAGIC = 0x4F435441564F5348
_HEAD = struct.Struct("=QQ")
"""Magic number and number of ranks."""
_MET, _FILLED, _EMPTY = range(3)
"""Kinds of semaphores of a pair: round reached, channel buffer filled, channel buffer emptied."""
_SPINS = 60
"""Tries before sleeping, some ten µs, about the skew of ranks with equal work; between them the thread yields
its processor."""


class RankLost(RuntimeError):
    """Another rank of the group has ended, has left, or did not arrive in time; the message names it."""


class _Layout:
    """Byte offsets of the parts."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._semaphores = SLOT * (1 + ranks)
        self._slots = self._semaphores + -(-3 * ranks * ranks * SLOT // mmap.PAGESIZE) * mmap.PAGESIZE
        self._channels = self._slots + 2 * ranks * CHUNK
        self.size = self._channels + 2 * ranks * ranks * CHUNK

    def pid(self, rank: int) -> int:
        return SLOT * (1 + rank)

    def semaphore(self, kind: int, source: int, target: int) -> int:
        return self._semaphores + SLOT * ((kind * self._ranks + source) * self._ranks + target)

    def slot(self, turn: int, rank: int) -> int:
        return self._slots + (2 * rank + turn) * CHUNK

    def channel(self, turn: int, source: int, target: int) -> int:
        return self._channels + (2 * (source * self._ranks + target) + turn) * CHUNK


def allocate(ranks: int) -> int:
    """Return the descriptor of a memfd for a group, freed with the last process that holds it."""
    layout = _Layout(ranks)
    descriptor = os.memfd_create("group")
    os.ftruncate(descriptor, layout.size)
    with mmap.mmap(descriptor, layout.size) as memory:
        _HEAD.pack_into(memory, 0, _MAGIC, ranks)
        for source in range(ranks):
            for target in range(ranks):
                for kind in (_MET, _FILLED, _EMPTY):
                    semaphore = Semaphore(memory, layout.semaphore(kind, source, target), create=True)
                    if kind == _EMPTY:
                        semaphore.post()
                        semaphore.post()
                    del semaphore  # so that the memory can be unmapped here
    return descriptor


class SharedGroup:
    """One rank's view of the shared memory. One thread at a time.

    Methods that wait raise RankLost for a rank that has ended or left, or did not arrive within the timeout;
    the group cannot be used afterwards.
    """

    def __init__(self, descriptor: int, rank: int, size: int, timeout: float) -> None:
        """Map the memory, without waiting. Call `watch` once all ranks have done so, before any other method.

        Raises ValueError when the memory is not that of a group of `size`.
        """
        layout = _Layout(size)
        if os.fstat(descriptor).st_size != layout.size:
            raise ValueError(f"this is not the memory of a group of {size} ranks")
        self.rank, self.size, self.timeout = rank, size, timeout
        self._layout = layout
        self._memory = memory = mmap.mmap(descriptor, layout.size)
        if _HEAD.unpack_from(memory, 0) != (_MAGIC, size):
            raise ValueError(f"this is not the memory of a group of {size} ranks")
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._turn = 0
        self._outgoing = [0] * size
        self._incoming = [0] * size
        """Index of the next buffer of each channel."""
        others = [other for other in range(size) if other != rank]
        self._others = others
        self._tell = [self._semaphore(_MET, rank, other) for other in others]
        self._told = {other: self._semaphore(_MET, other, rank) for other in others}
        self._filled = {other: self._semaphore(_FILLED, rank, other) for other in others}
        self._to_empty = {other: self._semaphore(_FILLED, other, rank) for other in others}
        self._emptied = {other: self._semaphore(_EMPTY, other, rank) for other in others}
        self._to_fill = {other: self._semaphore(_EMPTY, rank, other) for other in others}
        self._slots: dict[torch.dtype, list[list[Tensor]]] = {}
        self._peers: dict[int, Peer] = {}
        self._closed = False
        self._lost: RankLost | None = None
        WORD.pack_into(memory, layout.pid(rank), os.getpid())

    def watch(self) -> None:
        """Open pidfds of the other ranks' processes, by which their ends are noticed."""
        for other in self._others:
            (pid,) = WORD.unpack_from(self._memory, self._layout.pid(other))
            self._peers[other] = Peer(pid)

    def slots(self, dtype: torch.dtype) -> list[Tensor]:
        """Return every rank's slot of this round, each [CHUNK / itemsize]; a rank writes into its own."""
        found = self._slots.get(dtype)
        if found is None:
            found = self._slots[dtype] = [
                [self._buffer(self._layout.slot(turn, rank)).view(dtype) for rank in range(self.size)]
                for turn in range(2)
            ]
        return found[self._turn]

    def meet(self) -> None:
        """Barrier that ends a round: afterwards every rank's slot of the round can be read.

        A rank that arrives has finished reading the slots of the round before. So once all have arrived,
        those slots, which are the next in turn, can be written again.
        """
        for semaphore in self._tell:
            semaphore.post()
        for other, semaphore in self._told.items():
            self._await(semaphore, other)
        self._turn ^= 1

    def put(self, target: int, data: Tensor) -> None:
        """Send `data` [at most CHUNK] uint8 to another rank, waiting while both buffers are full."""
        self._await(self._to_fill[target], target)
        turn = self._outgoing[target]
        self._buffer(self._layout.channel(turn, self.rank, target), len(data)).copy_(data)
        self._outgoing[target] = turn ^ 1
        self._filled[target].post()

    def take(self, source: int, data: Tensor) -> None:
        """Receive into `data` [at most CHUNK] uint8 from another rank, waiting for it."""
        self._await(self._to_empty[source], source)
        turn = self._incoming[source]
        data.copy_(self._buffer(self._layout.channel(turn, source, self.rank), len(data)))
        self._incoming[source] = turn ^ 1
        self._emptied[source].post()

    def close(self) -> None:
        """Leave the group: ranks that wait for this one raise RankLost."""
        if self._closed:
            return
        self._closed = True
        self._lost = RankLost("this rank has left it")
        WORD.pack_into(self._memory, self._layout.pid(self.rank), LEFT)
        del self._tell, self._told, self._filled, self._to_empty, self._emptied, self._to_fill
        del self._bytes
        self._slots.clear()
        unmap(self._memory)
        for peer in self._peers.values():
            peer.close()

    def _semaphore(self, kind: int, source: int, target: int) -> Semaphore:
        return Semaphore(self._memory, self._layout.semaphore(kind, source, target), create=False)

    def _buffer(self, start: int, length: int = CHUNK) -> Tensor:
        return self._bytes[start : start + length]

    def _await(self, semaphore: Semaphore, other: int) -> None:
        if self._lost is not None:
            raise RankLost(f"the group is of no more use: {self._lost}")
        for _ in range(_SPINS):
            if semaphore.try_wait():
                return
            os.sched_yield()
        deadline = Deadline(self.timeout)
        while not semaphore.wait(deadline.glance):
            gone = self._gone(other)
            # Looked at after that: to come here may have been its last act.
            if semaphore.try_wait():
                return
            if gone or deadline.over:
                why = gone or f"did not come within {self.timeout:g} s"
                self._lost = RankLost(f"rank {other} of {self.size} {why}; rank {self.rank} waits for it")
                raise self._lost

    def _gone(self, other: int) -> str:
        """Return why the rank can no longer arrive, or nothing if it can."""
        (pid,) = WORD.unpack_from(self._memory, self._layout.pid(other))
        if pid == LEFT:
            return "has left the group"
        return "" if self._peers[other].alive else f"(process {pid}) has ended"
