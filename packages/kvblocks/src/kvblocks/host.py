"""Host tier: copies of blocks in host memory, for swapped-out requests and evicted prefixes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvblocks.pool import BlockPool
from kvblocks.prefix import HostCopy, Prefix, PrefixHit
from kvblocks.tables import LayerGroup


class CopyList(NamedTuple):
    """Block `sources[i]` is copied to block `destinations[i]`; each int32 [n], no destination twice."""

    sources: NDArray[np.int32]
    destinations: NDArray[np.int32]


_NO_COPIES = CopyList(np.empty(0, np.int32), np.empty(0, np.int32))


class BlockCopies(NamedTuple):
    """Copies to perform on the KV cache before the next step: first `swap_out`, then `swap_in`."""

    swap_out: CopyList = _NO_COPIES
    """From the device to the host."""
    swap_in: CopyList = _NO_COPIES
    """From the host to the device."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks to copy; mostly 0."""
        return self.swap_out.sources.size + self.swap_in.sources.size


class PendingCopies:
    """Copies between a device pool and a host pool that the caller is yet to perform.

    A pending copy keeps a reference to the blocks it names, except to the device blocks that a swap-out
    reads. So until it is drained, no such block is allocated again, and no block is the destination of two
    copies. The order does the rest:

    - Swap-outs come first and read device blocks as the last step left them. Those may be allocated again at
      once, because whoever gets one writes to it later: by a swap-in, or in the next step. None of them is
      itself the destination of a pending swap-in, since those are referenced; see `is_destination`.
    - Swap-ins may read host blocks that a swap-out has just written.
    """

    def __init__(self, device: BlockPool, host: BlockPool) -> None:
        self._device = device
        self._host = host
        self._swap_out: list[CopyList] = []
        self._swap_in: list[CopyList] = []
        self._destinations: set[int] = set()

    def swap_out(self, blocks: NDArray[np.int32], host_blocks: NDArray[np.int32]) -> None:
        """Copy device blocks to referenced host blocks; both int32 [n], distinct.

        None of `blocks` is the destination of a pending swap-in.
        """
        self._host.share(host_blocks)
        self._swap_out.append(CopyList(blocks, host_blocks))

    def swap_in(self, host_blocks: NDArray[np.int32], blocks: NDArray[np.int32]) -> None:
        """Copy host blocks to referenced device blocks; both int32 [n], distinct."""
        self._host.share(host_blocks)
        self._device.share(blocks)
        self._swap_in.append(CopyList(host_blocks, blocks))
        self._destinations.update(blocks.tolist())

    def is_destination(self, blocks: NDArray[np.int32]) -> bool:
        """Whether a pending swap-in is yet to write any of the device blocks (int32 [n])."""
        return bool(self._destinations) and not self._destinations.isdisjoint(blocks.tolist())

    def drain(self) -> BlockCopies:
        """Return all pending copies, which are no longer pending, and drop their references."""
        if not (self._swap_out or self._swap_in):
            return BlockCopies()
        copies = self._joined()
        swap_out, swap_in = self._swap_out, self._swap_in
        self._swap_out, self._swap_in = [], []
        self._destinations.clear()
        for copy in swap_out:
            self._host.release(copy.destinations)
        for copy in swap_in:
            self._host.release(copy.sources)
            self._device.release(copy.destinations)
        return copies

    def references(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Device and host blocks that pending copies hold references to, each as often as they do."""
        copies = self._joined()
        host = np.concatenate((copies.swap_out.destinations, copies.swap_in.sources))
        return copies.swap_in.destinations, host

    def _joined(self) -> BlockCopies:
        return BlockCopies(_join(self._swap_out), _join(self._swap_in))


def _join(copies: list[CopyList]) -> CopyList:
    if not copies:
        return _NO_COPIES
    return CopyList(
        np.concatenate([copy.sources for copy in copies]),
        np.concatenate([copy.destinations for copy in copies]),
    )


class HostTier:
    """A second pool, whose blocks hold copies of device blocks.

    Requests that are swapped out hold references to theirs. Blocks that are published, because those requests
    left them behind or the device pool evicted them, are cached: they are found by key and reused least
    recently used first. Content that is here under its key is never copied here again.
    """

    def __init__(self, pool: BlockPool, device: BlockPool, groups: Sequence[LayerGroup]) -> None:
        self.pool = pool
        self.pending = PendingCopies(device, pool)
        self._device = device
        self._groups = groups
        self._swapped_out: set[Prefix] = set()

    def swap_out(self, prefix: Prefix, row: int, length: int) -> bool:
        """Copy the first `length` tokens of the row to the host, for `prefix`.

        False, with nothing changed, if there is no room, or blocks of the row wait for a pending swap-in.
        """
        block_size = self._groups[0].tables.block_size
        full, end = length // block_size, -(-length // block_size)
        firsts, held, keys = [], [], []
        for group in self._groups:
            first = int(group.tables.firsts[row])
            known = group.keys(prefix.keys[first:full])
            firsts.append(first)
            held.append(group.tables.array[row, first:end])
            keys += known + [b""] * (end - first - len(known))
        stored = self._store(np.concatenate(held), keys)
        if stored is None:
            return False
        ends = np.cumsum([part.size for part in held])[:-1]
        prefix.host_copy = HostCopy(length, tuple(firsts), tuple(np.split(stored, ends)))
        self._swapped_out.add(prefix)
        return True

    def discard(self, prefix: Prefix) -> None:
        """Release the blocks of a request that was swapped out; nothing if it was not."""
        if prefix.host_copy is None:
            return
        self.pool.release(np.concatenate(prefix.host_copy.blocks))
        prefix.host_copy = None
        self._swapped_out.discard(prefix)

    def swap_in(self, prefix: Prefix, hit: PrefixHit) -> list[NDArray[np.int32]]:
        """Allocate device blocks for the hit's host blocks.

        Returns all device blocks of the hit, int32 [n] for each group.
        """
        sources = np.concatenate([part.host_blocks for part in hit.groups])
        # Allocating may evict, and evicted blocks are copied to the host: not over these.
        self.pool.share(sources)
        fresh = self._device.allocate(sources.size)
        self.pending.swap_in(sources, fresh)
        self.pool.release(sources)
        tables = []
        full = min(hit.num_tokens // self._groups[0].tables.block_size, len(prefix.keys))
        for group, part in zip(self._groups, hit.groups):
            blocks = part.blocks.copy()
            absent = np.flatnonzero(blocks < 0)
            blocks[absent], fresh = fresh[: absent.size], fresh[absent.size :]
            keyed = absent[absent + part.first < full]
            keys = [prefix.keys[index] for index in (keyed + part.first).tolist()]
            self._device.publish(blocks[keyed], group.keys(keys))
            tables.append(blocks)
        return tables

    def offload(self, blocks: NDArray[np.int32], keys: list[bytes]) -> None:
        """Copy evicted device blocks (int32 [n], least recently used first) here, unless their keys are here.

        Only the most recently used of them if there is too little room.
        """
        pool = self.pool
        stored = np.fromiter(map(pool.lookup, keys), np.int32, len(keys))
        touched = stored[stored >= 0]
        pool.share(touched)
        pool.release(touched[::-1])
        # The most recent first, since it is to outlast the others here too.
        chosen = np.flatnonzero(stored < 0)
        chosen = chosen[max(chosen.size - pool.num_free, 0) :][::-1]
        if chosen.size:
            fresh = pool.allocate(chosen.size)
            self.pending.swap_out(blocks[chosen], fresh)
            pool.publish(fresh, [keys[i] for i in chosen.tolist()])
            pool.release(fresh)

    def check(self) -> None:
        """Walk every invariant of the host pool and its holders; raise IntegrityError if one is broken."""
        self.pool.check()
        copies = [prefix.host_copy for prefix in self._swapped_out if prefix.host_copy]
        swapped_out = [blocks for copy in copies for blocks in copy.blocks]
        self.pool.check_references(np.concatenate([*swapped_out, self.pending.references()[1]]))

    def _store(self, blocks: NDArray[np.int32], keys: list[bytes]) -> NDArray[np.int32] | None:
        """Host blocks for the device blocks, int32 [n], a reference each; None if there is no room for them.

        An empty key stands for a block that is not full.
        """
        pool = self.pool
        stored = np.fromiter(map(pool.lookup, keys), np.int32, len(keys))
        absent = np.flatnonzero(stored < 0)
        here = stored[stored >= 0]
        revived = int(np.count_nonzero(pool.refcounts[here] == 0))
        if absent.size + revived > pool.num_free or self.pending.is_destination(blocks[absent]):
            return None
        pool.share(here)
        if absent.size:
            fresh = pool.allocate(absent.size)
            self.pending.swap_out(blocks[absent], fresh)
            keyed = [(block, keys[i]) for block, i in zip(fresh.tolist(), absent.tolist()) if keys[i]]
            pool.publish([block for block, _ in keyed], [key for _, key in keyed])
            stored[absent] = fresh
        return stored
