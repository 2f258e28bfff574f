"""Pool of KV cache blocks: reference counts, LRU reuse, the prefix index and its events."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvblocks.errors import OutOfBlocks, require
from kvblocks.lru import LruQueue


class BlockStored(NamedTuple):
    """Event: `block` was published under `key`."""

    block: int
    key: bytes


class BlockRemoved(NamedTuple):
    """Event: `key` left the index, because `block` was evicted or the cache was reset."""

    block: int
    key: bytes


class AllCleared(NamedTuple):
    """Event: the index is empty."""


CacheEvent = BlockStored | BlockRemoved | AllCleared


@dataclass(slots=True)
class PoolStats:
    """Totals since the pool was made, in blocks."""

    allocated: int = 0
    published: int = 0
    evicted: int = 0


BLANK, CACHED, USED, SHARED = range(4)
"""States of a block, in `BlockPool.states`."""


class Match(NamedTuple):
    """Blocks found by their keys, int32 [n], and their stamps then, int64 [n], to see lost keys by."""

    blocks: NDArray[np.int32]
    stamps: NDArray[np.int64]


NO_MATCH = Match(np.empty(0, np.int32), np.empty(0, np.int64))

_FEW = 16
"""Up to this many ids, Python checks a list faster than numpy does an array."""


class BlockPool:
    """`num_blocks` blocks, ids 0 to num_blocks - 1, each of them usable.

    A block is in one of three states:

    - referenced: its reference count is 1 or more;
    - blank: free, without cached content;
    - cached: free, its content published under a key. `share` takes it as it is.

    `allocate` takes blank blocks first, the last released first, and then cached ones, the least recently
    used first; those are evicted and lose their key. A call that raises has changed nothing.

    `on_evict` is called with the blocks that `allocate` evicts (int32 [n], least recently used first) and
    their keys, before anything is written to them.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        record_events: bool = False,
        on_evict: Callable[[NDArray[np.int32], list[bytes]], None] | None = None,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.stats = PoolStats()
        self._refcounts = np.zeros(num_blocks, np.int32)
        self._blank = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_blank = num_blocks
        self._cached = LruQueue(num_blocks)
        self._index: dict[bytes, int] = {}
        self._published = np.zeros(num_blocks, np.bool_)
        # Valid for published blocks only; others may still have an old one.
        self._keys = [b""] * num_blocks
        self._seat = np.empty(num_blocks, np.int32)
        # Incremented whenever the block loses its key, so that `rematch` can tell whether it still has it.
        self._stamps = np.zeros(num_blocks, np.int64)
        self._events: list[CacheEvent] | None = [] if record_events else None
        self._on_evict = on_evict

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can take: blank and cached ones."""
        return self._num_blank + len(self._cached)

    @property
    def usage(self) -> float:
        """The share of blocks that are referenced, 0 to 1."""
        return 1 - self.num_free / self.num_blocks

    @property
    def refcounts(self) -> NDArray[np.int32]:
        """Reference counts, int32 [num_blocks]: a live, read-only view."""
        view = self._refcounts.view()
        view.flags.writeable = False
        return view

    def states(self) -> NDArray[np.int8]:
        """State of each block, int8 [num_blocks]: BLANK, CACHED, USED (one reference) or SHARED (more)."""
        references = self._refcounts
        states = np.minimum(references, 2).astype(np.int8)
        # USED is 2 and SHARED 3; among the free ones CACHED is 1.
        states += (references > 0) | self._published
        return states

    def allocate(self, n: int) -> NDArray[np.int32]:
        """Take `n` free blocks, int32 [n], with one reference each.

        Raises OutOfBlocks, and takes none, when fewer are free.
        """
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        if n > self.num_free:
            raise OutOfBlocks(n, self.num_free)
        left = max(self._num_blank - n, 0)
        blocks = self._blank[left : self._num_blank][::-1].copy()
        self._num_blank = left
        evicted = None
        if blocks.size < n:
            evicted = self._cached.pop(n - blocks.size)
            blocks = np.concatenate((blocks, evicted))
        self._refcounts[blocks] = 1
        self.stats.allocated += n
        if evicted is not None:
            self.stats.evicted += evicted.size
            listed = self._unpublish(evicted)
            if self._on_evict is not None:
                self._on_evict(evicted, [self._keys[block] for block in listed])
        return blocks

    def share(self, blocks: ArrayLike) -> None:
        """Add a reference to each of `blocks` (int [n], distinct). A cached block becomes referenced.

        Raises ValueError if one is blank.
        """
        ids = self._distinct(blocks)
        unreferenced = ids[self._refcounts[ids] == 0]
        blank = unreferenced[~self._published[unreferenced]]
        if blank.size:
            raise ValueError(f"blocks {blank.tolist()} are free and have no content to share")
        self._cached.remove(unreferenced)
        self._refcounts[ids] += 1

    def release(self, blocks: ArrayLike) -> None:
        """Drop a reference from each of `blocks` (int [n], distinct, in the order of their sequence).

        Those left without one become free. A sequence's tail is reused before its head, because the head is a
        prefix of more prompts.
        """
        ids = self._distinct(blocks)
        counts = self._refcounts[ids]
        if not counts.all():
            raise ValueError(f"blocks {ids[counts == 0].tolist()} are released but have no reference")
        self._refcounts[ids] = counts - 1
        freed = ids[counts == 1]
        published = self._published[freed]
        self._cached.append(freed[published][::-1])
        self._push_blank(freed[~published])

    def lookup(self, key: bytes) -> int:
        """The block published under `key`, or -1. Does not count as a use."""
        return self._index.get(key, -1)

    def match(self, keys: Sequence[bytes]) -> NDArray[np.int32]:
        """The blocks of the longest leading run of published `keys`, int32 [hits]."""
        found = []
        get = self._index.get
        for key in keys:
            block = get(key)
            if block is None:
                break
            found.append(block)
        return np.array(found, np.int32)

    def rematch(self, keys: Sequence[bytes], earlier: Match = NO_MATCH) -> Match:
        """`match` for `keys`, given an earlier result for them or for their beginning.

        Costs a vectorised comparison and one lookup as long as the result is the same.
        """
        kept = self._stamps[earlier.blocks] == earlier.stamps
        num_kept = earlier.blocks.size if kept.all() else int(kept.argmin())
        ended = num_kept == len(keys) or keys[num_kept] not in self._index
        if ended and num_kept == earlier.blocks.size:
            return earlier
        blocks = np.concatenate((earlier.blocks[:num_kept], self.match(keys[num_kept:])))
        return Match(blocks, self._stamps[blocks])

    def key_of(self, block: int) -> bytes | None:
        """The key that `block` is published under, or None."""
        return self._keys[block] if self._published[block] else None

    def keys(self) -> list[bytes]:
        """All published keys."""
        return list(self._index)

    def publish(self, blocks: ArrayLike, keys: Sequence[bytes]) -> None:
        """Enter `blocks` (int [n], distinct, referenced) in the prefix index under `keys`, one each.

        Only for blocks that are filled before any step planned from now on reads them. A key
        that is published already keeps its block. Raises ValueError if a block is not referenced, or is
        published under another key: content never changes under a key.
        """
        ids = self._distinct(blocks)
        if ids.size != len(keys):
            raise ValueError(f"{ids.size} blocks cannot be published under {len(keys)} keys")
        if not all(keys):
            raise ValueError("a key is empty")
        free = ids[self._refcounts[ids] == 0]
        if free.size:
            raise ValueError(f"blocks {free.tolist()} are published but have no reference")
        listed = ids.tolist()
        for block, key in zip(listed, keys) if self._published[ids].any() else ():
            if self._published[block] and self._keys[block] != key:
                raise ValueError(f"block {block} is published under another key already")
        index = self._index
        stored = []
        for block, key in zip(listed, keys):
            if key not in index:
                index[key] = block
                self._keys[block] = key
                stored.append(block)
        self._published[stored] = True
        self.stats.published += len(stored)
        if self._events is not None:
            self._events += [BlockStored(block, self._keys[block]) for block in stored]

    def reset(self) -> int:
        """Remove the keys of all cached blocks, which become blank. Referenced blocks keep theirs.

        Returns how many keys are left.
        """
        blocks = self._cached.pop(len(self._cached))
        self._unpublish(blocks)
        self._push_blank(blocks)
        if self._events is not None and not self._index:
            self._events.append(AllCleared())
        return len(self._index)

    def repeated(self, blocks: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Mask, bool [n]: which of `blocks` (int32 [n], ids of this pool) occur again later in it."""
        # Of equal ids the last one's number stays in the seat.
        numbers = np.arange(blocks.size, dtype=np.int32)
        self._seat[blocks] = numbers
        return self._seat[blocks] != numbers

    def events(self) -> list[CacheEvent]:
        """Changes of the prefix index since the last call, oldest first.

        Raises RuntimeError unless the pool was made with `record_events=True`.
        """
        if self._events is None:
            raise RuntimeError("this pool records no events; create it with record_events=True")
        drained, self._events = self._events, []
        return drained

    def check(self) -> None:
        """Walk every invariant in O(num_blocks); raise IntegrityError with the numbers that disagree."""
        self._cached.check()
        blank = self._blank[: self._num_blank]
        cached = self._cached.blocks()
        listed = np.bincount(np.concatenate((blank, cached)), minlength=self.num_blocks)
        expected = (self._refcounts == 0).astype(listed.dtype)
        wrong = np.flatnonzero(listed != expected)
        require(
            wrong.size == 0,
            f"blocks {wrong.tolist()} with {self._refcounts[wrong].tolist()} references are "
            f"{listed[wrong].tolist()} times on a free list",
        )
        require(bool((self._refcounts >= 0).all()), "a reference count is below zero")
        require(not self._published[blank].any(), "a blank block has a key")
        require(bool(self._published[cached].all()), "a cached block has no key")
        keyed = np.flatnonzero(self._published).tolist()
        require(
            len(self._index) == len(keyed),
            f"{len(self._index)} keys are indexed and {len(keyed)} blocks are published",
        )
        lost = [block for block in keyed if self._index.get(self._keys[block]) != block]
        require(not lost, f"the index does not map the keys of blocks {lost} to them")

    def check_references(self, holders: NDArray[np.integer]) -> None:
        """Raise IntegrityError unless each block has as many references as `holders` (int [n]) names it."""
        held = np.bincount(holders, minlength=self.num_blocks)
        wrong = np.flatnonzero(held != self._refcounts)
        require(
            wrong.size == 0,
            f"blocks {wrong.tolist()} have {self._refcounts[wrong].tolist()} references "
            f"and are held {held[wrong].tolist()} times",
        )

    def _unpublish(self, blocks: NDArray[np.int32]) -> list[int]:
        """Remove the keys of published blocks from the index, and return the blocks as a list."""
        self._published[blocks] = False
        self._stamps[blocks] += 1
        listed = blocks.tolist()
        index, keys = self._index, self._keys
        for block in listed:
            del index[keys[block]]
        if self._events is not None:
            self._events += [BlockRemoved(block, keys[block]) for block in listed]
        return listed

    def _push_blank(self, blocks: NDArray[np.int32]) -> None:
        end = self._num_blank + blocks.size
        self._blank[self._num_blank : end] = blocks
        self._num_blank = end

    def _distinct(self, blocks: ArrayLike) -> NDArray[np.int32]:
        """`blocks` as int32 [n]; ValueError if an id is out of range or occurs twice."""
        ids = np.asarray(blocks, np.int32)
        if ids.ndim != 1:
            raise ValueError(f"block ids come as a list or a 1-d array, not with shape {ids.shape}")
        if ids.size == 0:
            return ids
        if ids.size <= _FEW:
            listed = ids.tolist()
            if len(set(listed)) == len(listed) and min(listed) >= 0 and max(listed) < self.num_blocks:
                return ids
        # Read as unsigned, a negative id is larger than any block.
        if ids.view(np.uint32).max() >= self.num_blocks:
            raise ValueError(f"block ids go from 0 to {self.num_blocks - 1}, not {ids.min()} to {ids.max()}")
        again = self.repeated(ids)
        if again.any():
            raise ValueError(f"blocks {ids[again].tolist()} occur more than once")
        return ids
