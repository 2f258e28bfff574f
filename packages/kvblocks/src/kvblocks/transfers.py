"""Copies of blocks that somebody else has to perform, in an order in which none of them goes wrong."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvblocks.pool import BlockPool


class CopyList(NamedTuple):
    """Block `sources[i]` goes to block `destinations[i]`; each int32 [n], no destination twice."""

    sources: NDArray[np.int32]
    destinations: NDArray[np.int32]


class BlockCopies(NamedTuple):
    """What to do to the real cache before the next step, in this order: `swap_out`, then `swap_in`."""

    swap_out: CopyList
    """From the device to the host."""
    swap_in: CopyList
    """From the host to the device."""

    @property
    def num_blocks(self) -> int:
        """How many blocks are to be copied; mostly 0."""
        return self.swap_out.sources.size + self.swap_in.sources.size


_Arrays = list[tuple[NDArray[np.int32], NDArray[np.int32]]]


class Transfers:
    """Copies that are due, between a device pool and a host pool (None if there is no host tier).

    A copy that is due keeps a reference to the blocks it names until it is drained, but for the device block
    that an `out` reads. So until then no block is given out again that is to be read from, or written to, and
    no block is the destination of two copies. The order does the rest:

    - `out` comes first and reads device blocks as the last step left them. They may be given out again at
      once, for whoever gets one writes to it later: by `in_`, or in the next step. No such block
      is itself the destination of a copy that is due, since those are referenced, and `is_due` tells.
    - `in_` reads host blocks that `out` may just have written.
    """

    def __init__(self, device: BlockPool, host: BlockPool | None) -> None:
        self._device = device
        self._host = host
        self._out: _Arrays = []
        self._in: _Arrays = []
        self._filling: set[int] = set()

    def out(self, blocks: NDArray[np.int32], host_blocks: NDArray[np.int32]) -> None:
        """Copy device blocks to referenced host blocks; both int32 [n], distinct. None of `blocks` is due."""
        self._tier.share(host_blocks)
        self._out.append((blocks, host_blocks))

    def in_(self, host_blocks: NDArray[np.int32], blocks: NDArray[np.int32]) -> None:
        """Copy host blocks to referenced device blocks; both int32 [n], distinct."""
        self._tier.share(host_blocks)
        self._device.share(blocks)
        self._in.append((host_blocks, blocks))
        self._filling.update(blocks.tolist())

    def is_due(self, blocks: NDArray[np.int32]) -> bool:
        """Whether any of the device blocks (int32 [n]) is yet to be written to by a copy."""
        return bool(self._filling) and not self._filling.isdisjoint(blocks.tolist())

    def drain(self) -> BlockCopies:
        """All copies that are due, from now on no longer due."""
        copies = BlockCopies(_joined(self._out), _joined(self._in))
        if copies.num_blocks:
            out, in_ = self._out, self._in
            self._out, self._in = [], []
            self._filling.clear()
            for _, host_blocks in out:
                self._tier.release(host_blocks)
            for host_blocks, blocks in in_:
                self._tier.release(host_blocks)
                self._device.release(blocks)
        return copies

    def references(self) -> tuple[list[int], list[int]]:
        """Device and host blocks to which copies that are due hold references, each as often as they do."""
        device = [*_joined(self._in).destinations]
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
