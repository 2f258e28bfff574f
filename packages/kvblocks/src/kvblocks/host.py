"""The host tier: blocks in the host's memory for rows that are swapped out and for evicted prefixes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvblocks.groups import LayerGroup
from kvblocks.opening import Opening
from kvblocks.pool import BlockPool
from kvblocks.prefix import HostCopy, Prefix
from kvblocks.transfers import Transfers


class HostTier:
    """A second pool, whose blocks hold copies of device blocks.

    Requests that are swapped out hold references to theirs. Blocks of known content, which those leave behind
    or which the device pool has evicted, are cached: they are found by key, and make room, least recently
    used first, for others. Content that is here by its key is never copied here again.
    """

    def __init__(
        self, pool: BlockPool, device: BlockPool, groups: Sequence[LayerGroup], transfers: Transfers
    ) -> None:
        self.pool = pool
        self.swapped: set[Prefix] = set()
        self._device = device
        self._groups = groups
        self._transfers = transfers

    def swap_out(self, prefix: Prefix, row: int, length: int) -> bool:
        """Copy the first `length` tokens of the row here, for `prefix`.

        False, with nothing changed, if there is no room, or blocks of the row wait for copies themselves.
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
        self.swapped.add(prefix)
        return True

    def forget(self, prefix: Prefix) -> None:
        """Give back the blocks of a request that was swapped out."""
        assert prefix.host_copy is not None
        self.pool.release(np.concatenate(prefix.host_copy.blocks))
        prefix.host_copy = None
        self.swapped.discard(prefix)

    def restore(self, prefix: Prefix, opening: Opening) -> list[NDArray[np.int32]]:
        """Take device blocks for what comes from here. Returns all blocks of each part, int32 [n] each."""
        sources = np.concatenate([part.host for part in opening.parts])
        # Allocating may evict, and what is evicted is copied here: not over these.
        self.pool.share(sources)
        fresh = self._device.allocate(sources.size)
        self._transfers.in_(sources, fresh)
        self.pool.release(sources)
        opened = []
        full = min(opening.num_tokens // self._groups[0].tables.block_size, len(prefix.keys))
        for group, part in zip(self._groups, opening.parts):
            blocks = part.device.copy()
            absent = np.flatnonzero(blocks < 0)
            blocks[absent], fresh = fresh[: absent.size], fresh[absent.size :]
            keyed = absent[absent + part.first < full]
            keys = [prefix.keys[index] for index in (keyed + part.first).tolist()]
            self._device.publish(blocks[keyed], group.keys(keys))
            opened.append(blocks)
        return opened

    def offload(self, blocks: NDArray[np.int32], keys: list[bytes]) -> None:
        """Keep what evicted device blocks (int32 [n], least recently used first) hold and is not here yet.

        The most recently used of them, if there is too little room.
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
            self._transfers.out(blocks[chosen], fresh)
            pool.publish(fresh, [keys[i] for i in chosen.tolist()])
            pool.release(fresh)

    def _store(self, blocks: NDArray[np.int32], keys: list[bytes]) -> NDArray[np.int32] | None:
        """Host blocks for the device blocks, int32 [n], a reference each; None if they cannot be had.

        An empty key says that the block's content has none.
        """
        pool = self.pool
        stored = np.fromiter(map(pool.lookup, keys), np.int32, len(keys))
        absent = np.flatnonzero(stored < 0)
        here = stored[stored >= 0]
        revived = int(np.count_nonzero(pool.refcounts[here] == 0))
        if absent.size + revived > pool.num_free or self._transfers.is_due(blocks[absent]):
            return None
        pool.share(here)
        if absent.size:
            fresh = pool.allocate(absent.size)
            self._transfers.out(blocks[absent], fresh)
            keyed = [(block, keys[i]) for block, i in zip(fresh.tolist(), absent.tolist()) if keys[i]]
            pool.publish([block for block, _ in keyed], [key for _, key in keyed])
            stored[absent] = fresh
        return stored
