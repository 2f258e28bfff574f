"""Paged KV memory as a scheduler sees it: rows that are allocated on a cached prefix, grow, and are freed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvblocks.errors import OutOfBlocks, require
from kvblocks.host import BlockCopies, HostTier
from kvblocks.pool import BlockPool
from kvblocks.prefix import Extra, Prefix, PrefixHasher, PrefixHit, find_prefix_hit, tagged
from kvblocks.tables import TableChanges, layer_groups


@dataclass(slots=True)
class CacheStats:
    """Totals of the prefix cache in tokens: looked up, found, and found on the host tier only.

    Each request counts once, when it first gets a row: after a preemption it finds its own blocks, which is
    no sharing.
    """

    queries: int = 0
    hits: int = 0
    restored: int = 0


class AllocatedRows:
    """State of the allocated rows, in columns of length `max_rows`.

    `allocated` is bool, the others are int32:

    - `computed`: tokens whose steps are committed;
    - `published`: leading blocks that are published, or would be if another one did not have their key;
    - `hashed`: leading blocks whose keys are known, never fewer.

    `unpublished` is the set of rows with more hashed blocks than published ones, mostly empty.
    """

    def __init__(self, max_rows: int) -> None:
        # Negative row numbers index the second half, which is never allocated.
        self._padded = np.zeros(2 * max_rows, np.bool_)
        self.allocated = self._padded[:max_rows]
        self.computed = np.zeros(max_rows, np.int32)
        self.published = np.zeros(max_rows, np.int32)
        self.hashed = np.zeros(max_rows, np.int32)
        self.unpublished: set[int] = set()
        self._prefixes: list[Prefix | None] = [None] * max_rows

    def add(self, row: int, prefix: Prefix, computed: int, published: int) -> None:
        """Mark a free row as allocated to `prefix`, with `computed` tokens and `published` blocks."""
        prefix.row = row
        self._prefixes[row] = prefix
        self.allocated[row] = True
        self.computed[row] = computed
        self.published[row] = published
        self.hashed[row] = len(prefix.keys)
        if self.published[row] < self.hashed[row]:
            self.unpublished.add(row)

    def remove(self, row: int) -> None:
        """Mark an allocated row as free. Its prefix keeps the number of computed tokens."""
        prefix = self.prefix(row)
        prefix.num_tokens = max(prefix.num_tokens, int(self.computed[row]))
        prefix.row = -1
        self._prefixes[row] = None
        self.allocated[row] = False
        self.unpublished.discard(row)

    def prefix(self, row: int) -> Prefix:
        """The prefix of an allocated row."""
        prefix = self._prefixes[row]
        assert prefix is not None, f"row {row} is allocated without a prefix"
        return prefix

    def require_free(self, row: int) -> None:
        """ValueError unless the row exists and is free."""
        if not 0 <= row < self.allocated.size:
            raise ValueError(f"rows go from 0 to {self.allocated.size - 1}, not {row}")
        if self.allocated[row]:
            raise ValueError(f"row {row} is allocated already")

    def require_allocated(self, rows: ArrayLike) -> None:
        """ValueError unless all of `rows` (int [n]) are allocated."""
        rows = np.asarray(rows, np.intp)
        try:
            allocated = self._padded[rows]
        except IndexError:
            allocated = np.zeros(rows.size, np.bool_)
        if np.count_nonzero(allocated) < rows.size:
            last = self.allocated.size - 1
            if rows.min() < 0 or rows.max() > last:
                raise ValueError(f"rows go from 0 to {last}, not from {rows.min()} to {rows.max()}")
            raise ValueError(f"rows {rows[~allocated].tolist()} are not allocated")


class PagedMemory:
    """A block pool, its prefix index and the block tables of `max_rows` rows, kept consistent.

    The life of a row: `allocate` gives it the cached blocks of its prompt, `grow` allocates blocks for the
    step that is being planned, `commit` says after the step which tokens are computed now, and `free`
    releases all blocks, or `swap_out` moves them to the host tier.

    - A row never begins with all of its tokens cached: one is left to compute, or there would be no logits.
    - A block is published by `grow`, as soon as a step that fills it is planned: requests with one prefix
      compute it once even if they begin in the same step. Where its tokens are not known by then, because
      they are yet to be sampled, it is published by `commit`.
    - A published block is full before anyone reads it. Every step that rows were grown for is run, in the
      order of planning, and each layer writes the keys and values of all the step's tokens before it reads
      any. A row allocated on the block begins in the step that fills it, or in a later one. The row that
      fills it holds it until that step has been run, even if its request ends or is preempted: call `free`
      and `swap_out` only then. So the block is not evicted, reused or copied to the host before.
    - Blocks of freed rows stay cached until the pool reuses them. With a host tier they are copied there
      then, and copied back when a row is allocated on them.
    - `windows` gives each layer group's sliding window in tokens, or None for full attention. Each has a
      table in `groups`; `tables` is the first one's. `commit` releases the blocks that a window has left.
    - The caller performs the copies of blocks: `drain_copies` after every plan, before its step.

    `salt` enters every key of this memory (the model's name, say), as `extra` enters a request's.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        max_blocks_per_row: int,
        prefix_caching: bool = True,
        salt: Extra = (),
        record_events: bool = False,
        host_blocks: int = 0,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self.pool = BlockPool(
            num_blocks,
            record_events=record_events,
            on_evict=self._offload if host_blocks else None,
        )
        self.groups = layer_groups(
            windows, self.pool, block_size=block_size, max_rows=max_rows, max_blocks=max_blocks_per_row
        )
        self.tables = self.groups[0].tables
        self._windowed = [group for group in self.groups if group.window is not None]
        self.host_pool = BlockPool(host_blocks) if host_blocks else None
        self._host = HostTier(self.host_pool, self.pool, self.groups) if self.host_pool else None
        self.prefix_caching = prefix_caching
        self.stats = CacheStats()
        self._salt = tagged(salt)
        self._rows = AllocatedRows(max_rows)

    @property
    def block_size(self) -> int:
        """Tokens a block holds."""
        return self.tables.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool; all of them are usable."""
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that no row holds, cached ones among them."""
        return self.pool.num_free

    @property
    def waste(self) -> float:
        """Share of the slots in allocated blocks that hold no computed token, 0 to 1."""
        allocated = (self.num_blocks - self.num_free) * self.block_size
        slots = sum(int(group.tables.counts.sum()) for group in self.groups) * self.block_size
        unused = slots - len(self.groups) * int(self._rows.computed[self._rows.allocated].sum())
        return unused / allocated if allocated else 0.0

    def prefix(self, tokens: NDArray[np.int32], extra: Extra = (), *, reuse: bool = True) -> Prefix:
        """The handle with which a request of `tokens` (int [n]) is allocated a row, now or later.

        Hashes the tokens unless prefix caching is off. `extra` separates requests that must not share blocks
        (an adapter, a tenant's salt). With `reuse=False` the request never gets cached blocks, since it needs
        every position computed (for prompt logprobs), but others may use its blocks.
        """
        ids = np.asarray(tokens)
        if not self.prefix_caching:
            return Prefix([], ids.size, None, reuse=reuse)
        hasher = PrefixHasher(self.block_size, self._salt + tagged(extra))
        return Prefix(hasher.extend(ids), ids.size, hasher, reuse=reuse)

    def cached_tokens(self, prefix: Prefix) -> int:
        """Number of tokens that `allocate` would find, on either tier."""
        return self._prefix_hit(prefix).num_tokens

    def blocks_for(self, length: int) -> int:
        """The most blocks that a lone request of `length` tokens ever holds at once, over all layer groups.

        That is ceil(length / block_size) for each group, also for one with a sliding window: only `commit`
        releases the blocks that a window has left, and a single step may run all tokens of the request. A
        table never has an entry beyond that number, so `grow` never asks for more, whatever the chunks; with
        small ones a windowed group stays below it.
        """
        return len(self.groups) * -(-length // self.block_size)

    def fits(self, prefix: Prefix, length: int, reserve: int = 0) -> bool:
        """Whether a row allocated now could grow to `length` tokens and leave `reserve` blocks free.

        Free blocks that are cached and would be the row's are not counted as free as well. Asking again is
        cheap while the prefix hit stays the same.
        """
        blocks = -(-length // self.block_size)
        if blocks > self.tables.max_blocks:
            return False
        taken = reserve
        for part in self._prefix_hit(prefix).groups:
            cached = part.device_blocks
            taken += max(blocks - part.first, part.blocks.size) - cached.size + self._unreferenced(cached)
        return taken <= self.num_free

    def allocate(self, row: int, prefix: Prefix) -> int:
        """Allocate `row` with the cached blocks of `prefix`, and return how many tokens they hold.

        That is the longest cached prefix in whole blocks, or all that the request had computed when it was
        swapped out. Blocks on the host get device blocks now, to be filled by the copies of `drain_copies`.
        Raises OutOfBlocks, with nothing changed, if there are too few for them (`fits` is False then), and
        ValueError if the row is allocated already, or another row has the prefix.
        """
        self._rows.require_free(row)
        if prefix.row >= 0:
            raise ValueError(f"this prefix is in use by row {prefix.row}")
        hit = self._prefix_hit(prefix)
        incoming = sum(part.host_blocks.size for part in hit.groups)
        if incoming:
            free = self.num_free - sum(self._unreferenced(part.device_blocks) for part in hit.groups)
            if incoming > free:
                raise OutOfBlocks(incoming, free)
        # Hold all cached blocks before allocating any, which evicts.
        for part in hit.groups:
            self.pool.share(part.device_blocks)
        tables = [part.blocks for part in hit.groups]
        if incoming:
            assert self._host is not None
            tables = self._host.swap_in(prefix, hit)
        for group, part, blocks in zip(self.groups, hit.groups, tables):
            group.tables.attach(row, blocks, part.first)
        self.discard(prefix)
        self._rows.add(row, prefix, hit.num_tokens, hit.num_tokens // self.block_size)
        if not prefix.counted:
            prefix.counted = True
            self.stats.queries += prefix.num_tokens
            self.stats.hits += hit.num_tokens
            self.stats.restored += max(part.host_blocks.size for part in hit.groups) * self.block_size
        return hit.num_tokens

    def needed(self, rows: ArrayLike, lengths: ArrayLike) -> int:
        """Number of blocks that `grow` would allocate."""
        if len(self.groups) == 1:
            return self.tables.needed(rows, lengths)
        return sum(group.tables.needed(rows, lengths) for group in self.groups)

    def grow(self, rows: ArrayLike, lengths: ArrayLike) -> None:
        """Allocate blocks for a step up to `lengths` (int [n]) tokens in each of `rows` (int [n], distinct).

        Publishes the blocks that the step fills, as far as their tokens are known: the step is to be run.
        Raises OutOfBlocks, with nothing changed, if too few blocks are free.
        """
        self._rows.require_allocated(rows)
        if len(self.groups) > 1:
            needed = self.needed(rows, lengths)
            if needed > self.num_free:
                raise OutOfBlocks(needed, self.num_free)
        for group in self.groups:
            group.tables.grow(rows, lengths)
        if self._rows.unpublished:
            self._publish_known(np.asarray(rows, np.intp), np.asarray(lengths))

    def commit(self, rows: ArrayLike, lengths: ArrayLike, tokens: NDArray[np.int32]) -> None:
        """Record that `tokens[row, :length]` are computed, and publish full blocks that `grow` could not.

        `rows` and `lengths` are int [n], `tokens` is the int32 [max_rows, max_length] array of all rows'
        tokens, read up to `length` only. Rows with nothing to publish cost a comparison. Blocks that a
        sliding window has left are released: steps in flight run later tokens, which do not attend to them
        either.
        """
        self._rows.require_allocated(rows)
        rows, lengths = np.asarray(rows), np.asarray(lengths)
        if self.prefix_caching:
            full = lengths // self.block_size
            filled = np.flatnonzero(full > self._rows.published[rows])
            if filled.size:
                self._publish_committed(rows[filled], full[filled], tokens)
        self._rows.computed[rows] = lengths
        for group in self._windowed:
            group.trim(rows, lengths)

    def free(self, row: int) -> None:
        """Release the row and its blocks. Its prefix may be allocated a row again."""
        self._rows.require_allocated([row])
        for group in self.groups:
            group.tables.free(row)
        self._rows.remove(row)

    def swap_out(self, row: int) -> bool:
        """Free the row and keep its computed tokens in the host tier, until its prefix is allocated again.

        False, with nothing changed, if the host tier has no room for it, or blocks of the row wait for a
        pending copy. Blocks whose content is there already are not copied again.
        """
        self._rows.require_allocated([row])
        if self._host is None:
            return False
        if not self._host.swap_out(self._rows.prefix(row), row, int(self._rows.computed[row])):
            return False
        self.free(row)
        return True

    def discard(self, prefix: Prefix) -> None:
        """Release the host blocks of a request that was swapped out; nothing if it was not."""
        if self._host is not None:
            self._host.discard(prefix)

    def drain_changes(self, group: int = 0) -> TableChanges:
        """Entries of a group's block table set since the last call, of rows that have not been freed since.

        Entries before a sliding window are not set: use any valid block for them, attention does not read it.
        """
        return self.groups[group].tables.drain_changes()

    def drain_copies(self) -> BlockCopies:
        """The pending copies of blocks; perform them before the step of the plan just made.

        First `swap_out`, then `swap_in`; `PendingCopies` says why that is safe. A block is copied as a whole,
        whichever layer group it serves. Blocks of pending copies stay held until then, so drain after an
        empty plan too. Without a host tier there are none.
        """
        return self._host.pending.drain() if self._host else BlockCopies()

    def reset(self) -> int:
        """Remove all cached prefixes that no request holds, on both tiers. Call it with no copies pending.

        Returns how many keys are left because requests hold their blocks.
        """
        left = self.pool.reset()
        return left + self._host.pool.reset() if self._host else left

    def check(self) -> None:
        """Walk every invariant of pools, tables, rows; raise IntegrityError with the numbers that disagree.

        For an idle moment: it walks all blocks and table entries, in Python where keys are compared.
        """
        self.pool.check()
        behind = np.flatnonzero(self._rows.allocated & (self._rows.published < self._rows.hashed)).tolist()
        require(
            self._rows.unpublished == set(behind),
            f"rows {behind} have unpublished keys, and {self._rows.unpublished} are listed",
        )
        rows = np.arange(self.tables.max_rows)
        holders = []
        for group in self.groups:
            group.tables.check()
            holders.append(group.tables.blocks(rows, group.tables.firsts, group.tables.counts))
            stray = np.flatnonzero(~self._rows.allocated & (group.tables.counts > 0))
            require(stray.size == 0, f"the free rows {stray.tolist()} hold blocks")
            for row in np.flatnonzero(self._rows.allocated).tolist():
                prefix = self._rows.prefix(row)
                require(prefix.row == row, f"row {row} has a prefix that belongs to row {prefix.row}")
                group.check_keys(row, prefix.keys, int(self._rows.published[row]))
        if self._host:
            self._host.check()
            holders.append(self._host.pending.references()[0])
        self.pool.check_references(np.concatenate(holders))

    def _publish_known(self, rows: NDArray[np.integer], lengths: NDArray[np.integer]) -> None:
        """Publish the blocks that are full at `lengths[i]` tokens of each row and have keys."""
        behind = np.flatnonzero(self._rows.published[rows] < self._rows.hashed[rows])
        if behind.size == 0:
            return
        rows = rows[behind]
        starts, hashed = self._rows.published[rows], self._rows.hashed[rows]
        ends = np.clip(lengths[behind] // self.block_size, starts, hashed)
        keys = []
        for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist()):
            keys += self._rows.prefix(row).keys[start:end]
        self._publish(rows, starts, ends, keys)
        self._rows.unpublished.difference_update(rows[ends == hashed].tolist())

    def _publish_committed(
        self, rows: NDArray[np.integer], ends: NDArray[np.integer], tokens: NDArray[np.int32]
    ) -> None:
        """Publish the blocks of each row up to `ends[i]`, which are full now, once they have keys."""
        beyond = rows[ends > self.tables.counts[rows]]
        if beyond.size:
            raise ValueError(f"rows {beyond.tolist()} have computed more tokens than their blocks hold")
        starts = self._rows.published[rows]
        keys = []
        for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist()):
            prefix = self._rows.prefix(row)
            prefix.extend(tokens[row], end * self.block_size)
            keys += prefix.keys[start:end]
        self._rows.hashed[rows] = ends
        self._publish(rows, starts, ends, keys)

    def _publish(
        self,
        rows: NDArray[np.integer],
        starts: NDArray[np.integer],
        ends: NDArray[np.integer],
        keys: list[bytes],
    ) -> None:
        """Publish the blocks `starts[i]` to `ends[i] - 1` of each row under their tokens' keys."""
        for group in self.groups:
            self.pool.publish(group.tables.blocks(rows, starts, ends), group.keys(keys))
        self._rows.published[rows] = ends

    def _offload(self, blocks: NDArray[np.int32], keys: list[bytes]) -> None:
        assert self._host is not None
        self._host.offload(blocks, keys)

    def _prefix_hit(self, prefix: Prefix) -> PrefixHit:
        """The cached blocks that a row of `prefix` would begin with."""
        limit = min(max(prefix.num_tokens - 1, 0) // self.block_size, self.tables.max_blocks)
        return find_prefix_hit(prefix, limit, self.groups, self.pool, self.host_pool)

    def _unreferenced(self, blocks: NDArray[np.int32]) -> int:
        """Number of the blocks that count as free until a row holds them."""
        return int(np.count_nonzero(self.pool.refcounts[blocks] == 0))
