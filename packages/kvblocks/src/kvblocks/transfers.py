"""Copies of blocks that somebody else has to perform, in an order in which none of them goes wrong."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvblocks.pool import BlockPool


class CopyList(NamedTuple):
    """Block `sources[i]` goes to block `destinations[i]`; each int32 [n], no destination twice."""

    sources: NDArray[np.int32]
    destinations: NDArray[np.int32]


class Copies(NamedTuple):
    """What to do to the real cache before the next step, in this order: `out`, then `in_`, then `copy`."""

    out: CopyList
    """From the device to the host."""
    in_: CopyList
    """From the host to the device."""
    copy: CopyList
    """From one block of the device to another."""

    @property
    def num_blocks(self) -> int:
        """How many blocks are to be copied; mostly 0."""
        return self.out.sources.size + self.in_.sources.size + self.copy.sources.size


_Arrays = list[tuple[NDArray[np.int32], NDArray[np.int32]]]


class Transfers:
    """Copies that are due, between a device pool and a host pool (None if there is no host tier).

    A copy that is due keeps a reference to the blocks it names until it is drained, but for the device block
    that an `out` reads. So until then no block is given out again that is to be read from, or written to, and
    no block is the destination of two copies. The order does the rest:

    - `out` comes first and reads device blocks as the last step left them. They may be given out again at
      once, for whoever gets one writes to it later: by `in_`, by `copy`, or in the next step. No such block
      is itself the destination of a copy that is due, since those are referenced, and `is_due` tells.
    - `in_` reads host blocks that `out` may just have written.
    - `copy` reads device blocks that `in_` may just have written. It never reads what another `copy` writes:
      a copy of a copy that is due is taken from the first one's source.
    """

    def __init__(self, device: BlockPool, host: BlockPool | None) -> None:
        self._device = device
        self._host = host
        self._out: _Arrays = []
        self._in: _Arrays = []
        self._copy: _Arrays = []
        # Where the content of each device block comes from that a copy is yet to write to: for `copy` the
        # source, for `in_` itself.
        self._origins: dict[int, int] = {}

    def out(self, blocks: NDArray[np.int32], host_blocks: NDArray[np.int32]) -> None:
        """Copy device blocks to referenced host blocks; both int32 [n], distinct. None of `blocks` is due."""
        self._tier.share(host_blocks)
        self._out.append((blocks, host_blocks))

    def in_(self, host_blocks: NDArray[np.int32], blocks: NDArray[np.int32]) -> None:
        """Copy host blocks to referenced device blocks; both int32 [n], distinct."""
        self._tier.share(host_blocks)
        self._device.share(blocks)
        self._in.append((host_blocks, blocks))
        self._origins.update((block, block) for block in blocks.tolist())

    def copy(self, source: int, destination: int) -> None:
        """Copy one referenced device block to another."""
        source = self._origins.get(source, source)
        pair = np.array([source], np.int32), np.array([destination], np.int32)
        self._device.share(np.concatenate(pair))
        self._copy.append(pair)
        self._origins[destination] = source

    def is_due(self, blocks: NDArray[np.int32]) -> bool:
        """Whether any of the device blocks (int32 [n]) is yet to be written to by a copy."""
        return bool(self._origins) and not self._origins.keys().isdisjoint(blocks.tolist())

    def drain(self) -> Copies:
        """All copies that are due, from now on no longer due."""
        copies = Copies(_joined(self._out), _joined(self._in), _joined(self._copy))
        if copies.num_blocks:
            out, in_, copy = self._out, self._in, self._copy
            self._out, self._in, self._copy = [], [], []
            self._origins.clear()
            for _, host_blocks in out:
                self._tier.release(host_blocks)
            for host_blocks, blocks in in_:
                self._tier.release(host_blocks)
                self._device.release(blocks)
            for pair in copy:
                self._device.release(np.concatenate(pair))
        return copies

    def references(self) -> tuple[list[int], list[int]]:
        """Device and host blocks to which copies that are due hold references, each as often as they do."""
        device = [
            *_joined(self._in).destinations,
            *_joined(self._copy).sources,
            *_joined(self._copy).destinations,
        ]
        host = [*_joined(self._out).destinations, *_joined(self._in).sources]
        return device, host

    @property
    def _tier(self) -> BlockPool:
        assert self._host is not None, "there is no host tier"
        return self._host


_NO_COPIES = CopyList(np.empty(0, np.int32), np.empty(0, np.int32))


def _joined(pairs: _Arrays) -> CopyList:
    if not pairs:
        return _NO_COPIES
    return CopyList(np.concatenate([pair[0] for pair in pairs]), np.concatenate([pair[1] for pair in pairs]))
