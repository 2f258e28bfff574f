"""Paged KV memory as a scheduler sees it: rows that open on a cached prefix, grow, and close."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvblocks.errors import require
from kvblocks.hasher import Extra, PrefixHasher, tagged
from kvblocks.pool import BlockPool
from kvblocks.prefix import CacheStats, Prefix
from kvblocks.tables import BlockTables, Changes


class PagedMemory:
    """A block pool, its prefix index and the block tables of `max_rows` rows, kept in step.

    The life of a row: `open` holds what is cached of its prompt, `grow` makes room before a step, `computed`
    says after the step which tokens' keys and values exist now, and `close` gives all blocks back.

    - A row never opens with all of its tokens cached: one is left to compute, or there would be no logits.
    - A block is published once it is full and computed, never earlier, so no other row reads what is not
      there yet.
    - Closed rows' blocks stay cached until the pool hands them out again.

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
    ) -> None:
        self.pool = BlockPool(num_blocks, record_events=record_events)
        self.tables = BlockTables(
            self.pool, block_size=block_size, max_rows=max_rows, max_blocks=max_blocks_per_row
        )
        self.prefix_caching = prefix_caching
        self.stats = CacheStats()
        self._salt = tagged(salt)
        self._prefixes: list[Prefix | None] = [None] * max_rows
        self._open = np.zeros(max_rows, np.bool_)
        # Tokens of each open row whose keys and values exist, int32 [max_rows]. The full blocks among them
        # are published, all others are not.
        self._computed = np.zeros(max_rows, np.int32)

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

    def prefix(self, tokens: NDArray[np.int32], extra: Extra = (), *, reuse: bool = True) -> Prefix:
        """The handle with which a request of `tokens` (int [n]) opens a row, now or later.

        Hashes the tokens unless prefix caching is off. `extra` keeps requests apart that must not share
        blocks (an adapter, a tenant's salt). With `reuse=False` the request never opens on cached blocks,
        since it needs every position computed (for the prompt's logprobs), but others may use its blocks.
        """
        ids = np.asarray(tokens)
        if not self.prefix_caching:
            return Prefix(ids, None, reuse=reuse)
        return Prefix(ids, PrefixHasher(self.block_size, self._salt + tagged(extra)), reuse=reuse)

    def cached_tokens(self, prefix: Prefix) -> int:
        """How many tokens `open` would find cached now."""
        return self._match(prefix).size * self.block_size

    def fits(self, prefix: Prefix, length: int, reserve: int = 0) -> bool:
        """Whether a row opened now could grow to `length` tokens and leave `reserve` blocks free.

        Cached blocks that the row would hold come out of the free ones, and are not counted as both.
        """
        needed = -(-length // self.block_size)
        if needed > self.tables.max_blocks:
            return False
        hits = self._match(prefix)
        revived = int(np.count_nonzero(self.pool.refcounts[hits] == 0))
        return max(needed - hits.size, 0) + revived + reserve <= self.num_free

    def open(self, row: int, prefix: Prefix) -> int:
        """Begin `row` with the longest cached prefix, and return how many tokens that is.

        Raises ValueError if the row is open, or the prefix is in use by another row.
        """
        if not 0 <= row < self.tables.max_rows:
            raise ValueError(f"rows go from 0 to {self.tables.max_rows - 1}, not {row}")
        if self._open[row]:
            raise ValueError(f"row {row} is open already")
        if prefix.row >= 0:
            raise ValueError(f"this prefix is in use by row {prefix.row}")
        hits = self._match(prefix)
        self.pool.share(hits)
        self.tables.attach(row, hits)
        prefix.row = row
        self._prefixes[row] = prefix
        self._open[row] = True
        num_cached = hits.size * self.block_size
        self._computed[row] = num_cached
        if not prefix.counted:
            prefix.counted = True
            self.stats.queries += prefix.num_tokens
            self.stats.hits += num_cached
        return num_cached

    def needed(self, rows: ArrayLike, lengths: ArrayLike) -> int:
        """How many blocks `grow` would take."""
        return self.tables.needed(rows, lengths)

    def grow(self, rows: ArrayLike, lengths: ArrayLike) -> None:
        """Make room for `lengths` (int [n]) tokens in all in each of `rows` (int [n], distinct, open).

        Raises OutOfBlocks, with nothing changed, if too few blocks are free.
        """
        self._require_open(rows)
        self.tables.grow(rows, lengths)

    def computed(self, rows: ArrayLike, lengths: ArrayLike, tokens: NDArray[np.int32]) -> None:
        """Keys and values of `tokens[row, :length]` exist now: publish the blocks that became full.

        `rows` and `lengths` are int [n], `tokens` is the int32 [max_rows, max_length] array of all rows'
        tokens, read up to `length` only. Rows that filled no block cost a comparison.
        """
        if not self.prefix_caching:
            return
        self._require_open(rows)
        rows, lengths = np.asarray(rows), np.asarray(lengths)
        before, after = self._computed[rows] // self.block_size, lengths // self.block_size
        filled = np.flatnonzero(after > before)
        if filled.size:
            self._publish(rows[filled], before[filled], after[filled], tokens)
        self._computed[rows] = lengths

    def close(self, row: int) -> None:
        """Give the row's blocks back. Its prefix may open another row."""
        self._require_open([row])
        prefix = self._held(row)
        self.tables.free(row)
        prefix.num_tokens = max(prefix.num_tokens, int(self._computed[row]))
        prefix.row = -1
        self._prefixes[row] = None
        self._open[row] = False

    def drain_changes(self) -> Changes:
        """Block table entries set since the last call, of rows that have not been closed since."""
        return self.tables.drain_changes()

    def check(self) -> None:
        """Walk every invariant of pool, tables and rows; raise IntegrityError with the numbers that disagree.

        For an idle moment: it walks all blocks and table entries, in Python where keys are compared.
        """
        self.pool.check()
        self.tables.check()
        held = self.tables.blocks(np.arange(self.tables.max_rows), 0, self.tables.counts)
        rows = np.bincount(held, minlength=self.num_blocks)
        leaked = np.flatnonzero(rows != self.pool.refcounts)
        require(
            leaked.size == 0,
            f"blocks {leaked.tolist()} have {self.pool.refcounts[leaked].tolist()} references "
            f"and are in {rows[leaked].tolist()} rows",
        )
        closed = np.flatnonzero(~self._open & (self.tables.counts > 0))
        require(closed.size == 0, f"the closed rows {closed.tolist()} hold blocks")
        for row in np.flatnonzero(self._open).tolist():
            self._check_row(row)

    def _check_row(self, row: int) -> None:
        prefix = self._held(row)
        require(prefix.row == row, f"row {row} has a prefix that belongs to row {prefix.row}")
        full = int(self._computed[row]) // self.block_size
        for index, block in enumerate(self.tables.array[row, : self.tables.counts[row]].tolist()):
            key = self.pool.key_of(block)
            right = key is None or (index < full and key == prefix.keys[index])
            require(right, f"row {row}'s block {index} ({full} are full) has a key of other content")

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
            prefix = self._held(row)
            prefix.cover(tokens[row], end * self.block_size)
            keys += prefix.keys[start:end]
        self.pool.publish(self.tables.blocks(rows, starts, ends), keys)

    def _match(self, prefix: Prefix) -> NDArray[np.int32]:
        """The cached blocks that a row of `prefix` would open with."""
        if not prefix.reuse:
            return np.empty(0, np.int32)
        limit = min(max(prefix.num_tokens - 1, 0) // self.block_size, self.tables.max_blocks)
        return self.pool.match(prefix.keys[:limit])

    def _held(self, row: int) -> Prefix:
        prefix = self._prefixes[row]
        assert prefix is not None, f"row {row} is open without a prefix"
        return prefix

    def _require_open(self, rows: ArrayLike) -> None:
        rows = np.asarray(rows, np.intp)
        if rows.size and rows.min() < 0:
            raise ValueError(f"rows go from 0 to {self.tables.max_rows - 1}, not from {rows.min()}")
        is_open = self._open[rows]
        if not is_open.all():
            raise ValueError(f"rows {rows[~is_open].tolist()} are not open")
