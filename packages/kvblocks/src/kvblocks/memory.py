"""Paged KV memory as a scheduler sees it: rows that open on a cached prefix, grow, and close."""

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvblocks.errors import OutOfBlocks, require
from kvblocks.groups import layer_groups
from kvblocks.hasher import Extra, PrefixHasher, tagged
from kvblocks.host import HostTier
from kvblocks.integrity import check_references, check_row
from kvblocks.opening import Opening, find_opening
from kvblocks.pool import BlockPool
from kvblocks.prefix import Prefix
from kvblocks.rows import OpenRows
from kvblocks.stats import CacheStats
from kvblocks.tables import TableChanges
from kvblocks.transfers import BlockCopies, Transfers


class PagedMemory:
    """A block pool, its prefix index and the block tables of `max_rows` rows, kept in step.

    The life of a row: `allocate` holds what is cached of its prompt, `grow` makes room before a step,
    `commit` says after the step which tokens' keys and values exist now, and `free` gives all blocks back,
    or `swap_out` moves them to the host tier.

    - A row never opens with all of its tokens cached: one is left to compute, or there would be no logits.
    - A block is published once it is full and computed, never earlier, so no other row reads what is not
      there yet.
    - Closed rows' blocks stay cached until the pool hands them out again. With a host tier they are copied
      there then, and restored when a row opens with them.
    - `windows` gives each layer group's sliding window in tokens, or None for full attention. Each has a
      table in `groups`; `tables` is the first one's. Blocks that a window has left are given back as
      `commit` moves on.
    - Copies of blocks are the caller's to perform: `drain_copies` after every plan, before its step.

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host_pool = BlockPool(host_blocks, clock=clock) if host_blocks else None
        self.pool = BlockPool(
            num_blocks,
            record_events=record_events,
            on_evict=self._offload if host_blocks else None,
            clock=clock,
        )
        self.groups = layer_groups(
            windows, self.pool, block_size=block_size, max_rows=max_rows, max_blocks=max_blocks_per_row
        )
        self._transfers = Transfers(self.pool, self.host_pool)
        self._host: HostTier | None = None
        if self.host_pool:
            self._host = HostTier(self.host_pool, self.pool, self.groups, self._transfers)
        self.tables = self.groups[0].tables
        self._windowed = [group for group in self.groups if group.window is not None]
        self.prefix_caching = prefix_caching
        self.stats = CacheStats()
        self._salt = tagged(salt)
        self._rows = OpenRows(max_rows)

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
        """The share of allocated slots that hold no computed token, 0 to 1."""
        allocated = (self.num_blocks - self.num_free) * self.block_size
        slots = sum(int(group.tables.counts.sum()) for group in self.groups) * self.block_size
        unused = slots - len(self.groups) * int(self._rows.computed[self._rows.is_open].sum())
        return unused / allocated if allocated else 0.0

    def prefix(self, tokens: NDArray[np.int32], extra: Extra = (), *, reuse: bool = True) -> Prefix:
        """The handle with which a request of `tokens` (int [n]) opens a row, now or later.

        Hashes the tokens unless prefix caching is off. `extra` keeps requests apart that must not share
        blocks (an adapter, a tenant's salt). With `reuse=False` the request never opens on cached blocks,
        since it needs every position computed (for the prompt's logprobs), but others may use its blocks.
        """
        ids = np.asarray(tokens)
        if not self.prefix_caching:
            return Prefix([], ids.size, None, reuse=reuse)
        hasher = PrefixHasher(self.block_size, self._salt + tagged(extra))
        return Prefix(hasher.extend(ids), ids.size, hasher, reuse=reuse)

    def cached_tokens(self, prefix: Prefix) -> int:
        """How many tokens `allocate` would find, on either tier."""
        return self._opening(prefix).num_tokens

    def fits(self, prefix: Prefix, length: int, reserve: int = 0) -> bool:
        """Whether a row opened now could grow to `length` tokens and leave `reserve` blocks free.

        Cached blocks that the row would hold come out of the free ones, and are not counted as both. Asking
        again is cheap while the answer to what is cached stays the same.
        """
        blocks = -(-length // self.block_size)
        if blocks > self.tables.max_blocks:
            return False
        taken = reserve
        for part in self._opening(prefix).parts:
            taken += max(blocks - part.first, part.device.size) - part.hits.size + self._revived(part.hits)
        return taken <= self.num_free

    def blocks_for(self, length: int) -> int:
        """The most blocks that a lone request of `length` tokens ever holds at once, over all layer groups.

        That is ceil(length / block_size) for each group, one with a sliding window too: blocks that a window
        has left are given back only by `commit`, and a single step may run all of the request's tokens. No
        entry of a table past that is ever set, so `grow` never asks for more; a request in smaller chunks
        stays below it.
        """
        return len(self.groups) * -(-length // self.block_size)

    def allocate(self, row: int, prefix: Prefix) -> int:
        """Begin `row` with all that is known of `prefix`, and return how many tokens that is.

        That is the longest cached prefix in whole blocks, or what the request had computed when it was
        swapped out. Blocks that come from the host tier are taken now and filled by `drain_copies`. Raises
        OutOfBlocks, with nothing changed, if there are too few for them (where `fits` says so), and
        ValueError if the row is open, or the prefix is in use by another row.
        """
        self._rows.require_vacant(row)
        if prefix.row >= 0:
            raise ValueError(f"this prefix is in use by row {prefix.row}")
        opening = self._opening(prefix)
        incoming = sum(part.host.size for part in opening.parts)
        if incoming:
            free = self.num_free - sum(self._revived(part.hits) for part in opening.parts)
            if incoming > free:
                raise OutOfBlocks(incoming, free)
        # All that is there is held before anything is allocated, which evicts.
        for part in opening.parts:
            self.pool.share(part.hits)
        opened = [part.device for part in opening.parts]
        if incoming:
            assert self._host is not None
            opened = self._host.restore(prefix, opening)
        for group, part, blocks in zip(self.groups, opening.parts, opened):
            group.tables.attach(row, blocks, part.first)
        self.discard(prefix)
        self._rows.begin(row, prefix, opening.num_tokens)
        if not prefix.counted:
            prefix.counted = True
            self.stats.queries += prefix.num_tokens
            self.stats.hits += opening.num_tokens
            self.stats.restored += max(part.host.size for part in opening.parts) * self.block_size
        return opening.num_tokens

    def needed(self, rows: ArrayLike, lengths: ArrayLike) -> int:
        """How many blocks `grow` would take."""
        if len(self.groups) == 1:
            return self.tables.needed(rows, lengths)
        return sum(group.tables.needed(rows, lengths) for group in self.groups)

    def grow(self, rows: ArrayLike, lengths: ArrayLike) -> None:
        """Make room for `lengths` (int [n]) tokens in all in each of `rows` (int [n], distinct, open).

        Raises OutOfBlocks, with nothing changed, if too few blocks are free.
        """
        self._rows.require_open(rows)
        if len(self.groups) > 1:
            needed = self.needed(rows, lengths)
            if needed > self.num_free:
                raise OutOfBlocks(needed, self.num_free)
        for group in self.groups:
            group.tables.grow(rows, lengths)

    def commit(self, rows: ArrayLike, lengths: ArrayLike, tokens: NDArray[np.int32]) -> None:
        """Keys and values of `tokens[row, :length]` exist now: publish the blocks that became full.

        `rows` and `lengths` are int [n], `tokens` is the int32 [max_rows, max_length] array of all rows'
        tokens, read up to `length` only. Rows that filled no block cost a comparison. Blocks that a sliding
        window has left are given back: steps in flight run later tokens, which do not need them either.
        """
        self._rows.require_open(rows)
        rows, lengths = np.asarray(rows), np.asarray(lengths)
        if self.prefix_caching:
            before, after = self._rows.computed[rows] // self.block_size, lengths // self.block_size
            filled = np.flatnonzero(after > before)
            if filled.size:
                self._publish(rows[filled], before[filled], after[filled], tokens)
        self._rows.computed[rows] = lengths
        for group in self._windowed:
            group.trim(rows, lengths)

    def free(self, row: int) -> None:
        """Give the row's blocks back. Its prefix may open another row."""
        self._rows.require_open([row])
        for group in self.groups:
            group.tables.free(row)
        self._rows.end(row)

    def swap_out(self, row: int) -> bool:
        """Close the row and keep what it has computed in the host tier, for its prefix to open with again.

        False, with nothing changed, if the host tier has no room for it, or blocks of the row wait for
        copies themselves. Blocks whose content is there already are not copied again.
        """
        self._rows.require_open([row])
        if self._host is None:
            return False
        if not self._host.swap_out(self._rows.prefix(row), row, int(self._rows.computed[row])):
            return False
        self.free(row)
        return True

    def discard(self, prefix: Prefix) -> None:
        """Give back what the host tier keeps for a request that was swapped out; nothing if it was not."""
        if self._host is not None and prefix.host_copy is not None:
            self._host.forget(prefix)

    def drain_changes(self, group: int = 0) -> TableChanges:
        """Entries of a group's block table set since the last call, of rows that have not been closed since.

        Entries before a sliding window are not set: take any block that exists for them, nobody reads it.
        """
        return self.groups[group].tables.drain_changes()

    def drain_copies(self) -> BlockCopies:
        """The copies of blocks that are due; perform them before the step of the plan just made.

        First `swap_out`, then `swap_in`; `Transfers` says why that is safe. A block is copied as a whole,
        whichever layer group it serves. Blocks that are named stay held until then, so drain after an empty
        plan too. Without a host tier there is never anything to do.
        """
        return self._transfers.drain()

    def reset(self) -> int:
        """Forget all cached prefixes that no request holds, on both tiers.

        Returns how many keys are left because requests hold their blocks. Call it with no copies due.
        """
        left = self.pool.reset()
        return left + self._host.pool.reset() if self._host else left

    def check(self) -> None:
        """Walk every invariant of pools, tables, rows; raise IntegrityError with the numbers that disagree.

        For an idle moment: it walks all blocks and table entries, in Python where keys are compared.
        """
        self.pool.check()
        rows = np.arange(self.tables.max_rows)
        device, host = self._transfers.references()
        for group in self.groups:
            group.tables.check()
            device += group.tables.blocks(rows, group.tables.firsts, group.tables.counts).tolist()
            closed = np.flatnonzero(~self._rows.is_open & (group.tables.counts > 0))
            require(closed.size == 0, f"the closed rows {closed.tolist()} hold blocks")
            for row in np.flatnonzero(self._rows.is_open).tolist():
                check_row(self.pool, group, row, self._rows.prefix(row), int(self._rows.computed[row]))
        check_references("device", self.pool, device)
        if self._host:
            self._host.pool.check()
            copies = [prefix.host_copy for prefix in self._host.swapped if prefix.host_copy]
            host += [block for copy in copies for part in copy.blocks for block in part.tolist()]
            check_references("host", self._host.pool, host)

    def _publish(
        self,
        rows: NDArray[np.integer],
        starts: NDArray[np.integer],
        ends: NDArray[np.integer],
        tokens: NDArray[np.int32],
    ) -> None:
        """Publish the blocks `starts[i]` to `ends[i] - 1` of each row, which have just become full."""
        beyond = rows[ends > self.tables.counts[rows]]
        if beyond.size:
            raise ValueError(f"rows {beyond.tolist()} have computed more tokens than their blocks hold")
        keys = []
        for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist()):
            prefix = self._rows.prefix(row)
            prefix.cover(tokens[row], end * self.block_size)
            keys += prefix.keys[start:end]
        for group in self.groups:
            self.pool.publish(group.tables.blocks(rows, starts, ends), group.keys(keys))

    def _offload(self, blocks: NDArray[np.int32], keys: list[bytes]) -> None:
        assert self._host is not None
        self._host.offload(blocks, keys)

    def _opening(self, prefix: Prefix) -> Opening:
        """What a row of `prefix` would open with."""
        limit = min(max(prefix.num_tokens - 1, 0) // self.block_size, self.tables.max_blocks)
        return find_opening(prefix, limit, self.groups, self.pool, self.host_pool)

    def _revived(self, blocks: NDArray[np.int32]) -> int:
        """How many of the blocks count as free until a row holds them."""
        return int(np.count_nonzero(self.pool.refcounts[blocks] == 0))
