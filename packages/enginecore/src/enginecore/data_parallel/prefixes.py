"""A front-end's view of the prefixes that ranks have cached, from the events of their block pools.

Keys are the first 8 bytes of kvblocks' 32, as int64: enough to choose a rank by, where a wrong one costs time
only.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from enginecore.messages import KVEvents
from kvblocks import AllCleared, BlockPool, BlockStored, CacheEvent, PrefixHasher

_KEY_BYTES = 8
_NONE: NDArray[np.int64] = np.empty(0, np.int64)


def request_salt(cache_salt: str | None) -> tuple[tuple[str, bytes], ...]:
    """Return the extra keys of the requests that share a cache with those of the same `cache_salt` only."""
    return () if cache_salt is None else (("salt", cache_salt.encode()),)


def prompt_keys(prompt: NDArray[np.int32], block_size: int, cache_salt: str | None = None) -> list[int]:
    """Return the keys of the prompt's blocks that can be cached: the full ones but for the last token."""
    hasher = PrefixHasher(block_size, request_salt(cache_salt))
    return _short(hasher.extend(prompt[: max(len(prompt) - 1, 0)])).tolist()


def kv_events(events: Sequence[CacheEvent]) -> KVEvents:
    """Return what a block pool's events, oldest first, come to."""
    stored: dict[bytes, bool] = {}
    cleared = False
    for event in events:
        if isinstance(event, AllCleared):
            stored.clear()
            cleared = True
        else:
            stored[event.key] = isinstance(event, BlockStored)
    return KVEvents(
        stored=_short([key for key, held in stored.items() if held]),
        removed=_short([key for key, held in stored.items() if not held]),
        cleared=cleared,
    )


def all_keys(pool: BlockPool) -> KVEvents:
    """Return all that a pool has cached, for a front-end that follows its events from now on."""
    return KVEvents(stored=_short(pool.keys()), removed=_NONE, cleared=True)


class PrefixView:
    """The keys that each rank has cached.

    The index maps a key to the ranks that have it, as the bits of an integer, so that a prompt is looked up
    for all ranks at once: as many steps as the longest cached prefix has blocks.
    """

    def __init__(self, ranks: Sequence[int], block_size: int) -> None:
        self._bits = {rank: 1 << index for index, rank in enumerate(ranks)}
        self._block_size = block_size
        self._index: dict[int, int] = {}

    def __len__(self) -> int:
        """Number of keys, each counted once."""
        return len(self._index)

    def update(self, rank: int, events: KVEvents) -> None:
        """Take a rank's events."""
        bit = self._bits[rank]
        if events.cleared:
            self.clear(rank)
        index = self._index
        for key in events.removed.tolist():
            left = index.get(key, 0) & ~bit
            if left:
                index[key] = left
            else:
                index.pop(key, None)
        for key in events.stored.tolist():
            index[key] = index.get(key, 0) | bit

    def clear(self, rank: int) -> None:
        """Forget all keys of a rank, such as one that has ended."""
        kept = ~self._bits[rank]
        self._index = {key: left for key, ranks in self._index.items() if (left := ranks & kept)}

    def cached_tokens(self, keys: Sequence[int]) -> NDArray[np.int64]:
        """Return the tokens of the longest cached prefix on each rank, int64 [ranks], given `prompt_keys`."""
        blocks = np.zeros(len(self._bits), np.int64)
        get = self._index.get
        holders = (1 << len(self._bits)) - 1
        for count, key in enumerate(keys):
            remaining = holders & get(key, 0)
            _set(blocks, holders ^ remaining, count)
            holders = remaining
            if not holders:
                break
        _set(blocks, holders, len(keys))
        return blocks * self._block_size


def _set(blocks: NDArray[np.int64], ranks: int, count: int) -> None:
    """Set the entries of the ranks whose bits are set."""
    while ranks and count:
        bit = ranks & -ranks
        blocks[bit.bit_length() - 1] = count
        ranks ^= bit


def _short(keys: Sequence[bytes]) -> NDArray[np.int64]:
    return np.frombuffer(b"".join(key[:_KEY_BYTES] for key in keys), "<i8").astype(np.int64)
