"""Block tables of all rows, and the layer groups that have one each."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvblocks.errors import require
from kvblocks.pool import BlockPool


class TableChanges(NamedTuple):
    """Block table entries that were set: `array[rows[i], indices[i]] == blocks[i]`; each int32 [n]."""

    rows: NDArray[np.int32]
    indices: NDArray[np.int32]
    blocks: NDArray[np.int32]


class BlockTables:
    """Block table of each row: its tokens from `i * block_size` on are in block `array[row, i]`.

        block_size 4       array                firsts  counts
        row 0, 9 tokens    [ 5 |  2 |  7 | -1 ]    0       3     token 8 is in block 7, at offset 0
        row 1, empty       [-1 | -1 | -1 | -1 ]    0       0
        row 2, trimmed     [-1 |  3 |  6 | -1 ]    1       3     tokens 0 to 3 are no longer needed

    A row's table is append-only: an entry, once set, stays until it is trimmed or the row is freed. So a copy
    of the tables is kept up to date with new entries alone, and "new since the last drain" is one number a
    row. Trimmed entries may keep their old values in a copy: attention does not read them.

    `array` is int32 [max_rows, max_blocks], -1 where unused; a row's blocks are the entries `firsts` to
    `counts - 1`, each int32 [max_rows]. Treat all three as read-only.
    """

    def __init__(self, pool: BlockPool, *, block_size: int, max_rows: int, max_blocks: int) -> None:
        if min(block_size, max_rows, max_blocks) < 1:
            raise ValueError(f"{block_size=}, {max_rows=} and {max_blocks=} must each be at least 1")
        if max_blocks * block_size >= 2**31:
            raise ValueError(f"{max_blocks} blocks of {block_size} tokens overflow a 32-bit length")
        self.pool = pool
        self.block_size = block_size
        self.max_rows = max_rows
        self.max_blocks = max_blocks
        self.array = np.full((max_rows, max_blocks), -1, np.int32)
        self.firsts = np.zeros(max_rows, np.int32)
        self.counts = np.zeros(max_rows, np.int32)
        self._seat = np.empty(max_rows, np.int32)
        self._drained = np.zeros(max_rows, np.int32)

    def attach(self, row: int, blocks: ArrayLike, first: int = 0) -> None:
        """Set the entries of the empty `row` from `first` on to `blocks` (int [n]), taking their references.

        Entries before `first` count as trimmed.
        """
        self._check_row(row)
        ids = np.asarray(blocks, np.int32)
        if self.counts[row]:
            raise ValueError(f"row {row} holds {self.counts[row]} blocks already")
        end = first + ids.size
        if end > self.max_blocks:
            raise ValueError(f"{end} blocks do not fit a row of {self.max_blocks}")
        self.array[row, first:end] = ids
        self.counts[row] = end
        self.firsts[row] = first
        self._drained[row] = first

    def needed(self, rows: ArrayLike, lengths: ArrayLike) -> int:
        """Number of blocks that `grow` would allocate."""
        return int(self._missing(rows, lengths)[1].sum())

    def grow(self, rows: ArrayLike, lengths: ArrayLike) -> None:
        """Allocate blocks so that each of `rows` (int [n], distinct) holds `lengths` (int [n]) tokens in all.

        Only rows that cross a block boundary cost anything. Raises OutOfBlocks, or ValueError for a length
        beyond `max_blocks`, with nothing changed.
        """
        growing, missing = self._missing(rows, lengths)
        if growing.size == 0:
            return
        starts = self.counts[growing]
        self._check_growth(growing, starts + missing)
        blocks = self.pool.allocate(int(missing.sum()))
        self.array[_spread(growing, starts, missing)] = blocks
        self.counts[growing] = starts + missing

    def blocks(self, rows: ArrayLike, starts: ArrayLike, ends: ArrayLike) -> NDArray[np.int32]:
        """Entries `starts[i]` to `ends[i] - 1` of each of `rows` (int [n]), one row after another, int32."""
        starts = np.asarray(starts)
        return self.array[_spread(np.asarray(rows), starts, np.asarray(ends) - starts)]

    def held(self, row: int) -> NDArray[np.int32]:
        """The row's blocks, int32 [n]: a live view."""
        return self.array[row, self.firsts[row] : self.counts[row]]

    def trim(self, rows: ArrayLike, tokens: ArrayLike) -> None:
        """Release the blocks of `rows` (int [n], distinct) that end before token `tokens[i]` (int [n]) each.

        For sliding windows: `tokens[i]` is the first token that is still attended to. Only rows whose window
        has left a block cost anything.
        """
        rows = np.asarray(rows, np.intp)
        ends = np.minimum(np.asarray(tokens) // self.block_size, self.counts[rows])
        leaving = np.flatnonzero(ends > self.firsts[rows])
        if leaving.size == 0:
            return
        rows, ends = rows[leaving], ends[leaving]
        self._check_distinct(rows)
        starts = self.firsts[rows]
        entries = _spread(rows, starts, ends - starts)
        blocks = self.array[entries]
        self.array[entries] = -1
        self.firsts[rows] = ends
        self._drained[rows] = np.maximum(self._drained[rows], ends)
        while blocks.size:  # again only for blocks that several of the rows share
            again = self.pool.repeated(blocks)
            self.pool.release(blocks[~again])
            blocks = blocks[again]

    def free(self, row: int) -> None:
        """Release the row's blocks and leave the row empty."""
        self._check_row(row)
        held = self.held(row)
        self.pool.release(held)
        held[:] = -1
        self.firsts[row] = 0
        self.counts[row] = 0
        self._drained[row] = 0

    def drain_changes(self) -> TableChanges:
        """Entries set since the last call, by row and index, of rows that have not been freed since."""
        rows = np.flatnonzero(self.counts > self._drained)
        starts = self._drained[rows]
        self._drained[rows] = self.counts[rows]
        of, indices = _spread(rows, starts, self.counts[rows] - starts)
        return TableChanges(of.astype(np.int32), indices.astype(np.int32), self.array[of, indices])

    def check(self) -> None:
        """Walk every invariant of the tables; raise IntegrityError with the numbers that disagree."""
        rows, indices = _spread(np.arange(self.max_rows), self.firsts, self.counts - self.firsts)
        blocks = self.array[rows, indices]
        entries = int(np.count_nonzero(self.array != -1))
        require(entries == blocks.size, f"tables have {entries} entries and count {blocks.size}")
        known = (blocks >= 0) & (blocks < self.pool.num_blocks)
        require(bool(known.all()), f"tables have the blocks {blocks[~known].tolist()}, which do not exist")
        twice = blocks.size - np.unique(rows * self.pool.num_blocks + blocks).size
        require(twice == 0, f"rows have {twice} blocks more than once")
        holders = np.bincount(blocks, minlength=self.pool.num_blocks)
        short = np.flatnonzero(holders > self.pool.refcounts)
        require(
            short.size == 0,
            f"blocks {short.tolist()} are in {holders[short].tolist()} rows "
            f"with {self.pool.refcounts[short].tolist()} references",
        )
        ahead = np.flatnonzero((self._drained > self.counts) | (self._drained < self.firsts))
        require(ahead.size == 0, f"rows {ahead.tolist()} have drained entries that they do not hold")

    def _missing(
        self, rows: ArrayLike, lengths: ArrayLike
    ) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
        """The rows whose length exceeds their blocks, and the number of blocks that each lacks."""
        rows = np.asarray(rows, np.intp)
        lengths = np.asarray(lengths)
        crossing = np.flatnonzero(lengths > self.counts[rows] * self.block_size)
        growing = rows[crossing]
        return growing, -(-lengths[crossing] // self.block_size) - self.counts[growing]

    def _check_growth(self, rows: NDArray[np.integer], counts: NDArray[np.integer]) -> None:
        lowest, most = int(np.minimum.reduce(rows)), int(np.maximum.reduce(counts))
        if lowest < 0:
            raise ValueError(f"rows go from 0 to {self.max_rows - 1}, not from {lowest}")
        self._check_distinct(rows)
        if most > self.max_blocks:
            row = rows[counts.argmax()]
            raise ValueError(f"row {row} would need {most} blocks, a row holds {self.max_blocks}")

    def _check_distinct(self, rows: NDArray[np.integer]) -> None:
        if rows.size <= 16:
            if len(set(rows.tolist())) < rows.size:
                raise ValueError("a row occurs twice in one call")
            return
        # Of equal rows the last one's number stays in the seat.
        numbers = np.arange(rows.size, dtype=np.int32)
        self._seat[rows] = numbers
        if (self._seat[rows] != numbers).any():
            raise ValueError("a row occurs twice in one call")

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.max_rows:
            raise ValueError(f"rows go from 0 to {self.max_rows - 1}, not {row}")


def _spread(
    rows: NDArray[np.integer], starts: NDArray[np.integer], counts: NDArray[np.integer]
) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """Rows and indices of the entries `starts[i]` to `starts[i] + counts[i] - 1` of each row, in order."""
    if counts.size == np.count_nonzero(counts == 1):
        return rows, starts  # one entry each, as in most steps
    before = np.cumsum(counts) - counts
    indices = np.arange(counts.sum()) + np.repeat(starts - before, counts)
    return np.repeat(rows, counts), indices


class LayerGroup:
    """Layers that share a block table: those with full attention, or with a sliding window of one size.

    `window` is the number of tokens that a token attends to, itself included; None for all. All groups take
    blocks from one pool, so a block must have the same size in each. Blocks of different groups hold
    different keys and values for the same tokens, and are published under different keys.
    """

    def __init__(self, number: int, window: int | None, tables: BlockTables) -> None:
        if window is not None and window < 1:
            raise ValueError(f"a window holds at least 1 token, not {window}")
        self.window = window
        self.tables = tables
        # Token keys are 32 bytes, so a key with a suffix is no other group's.
        self._suffix = number.to_bytes(2, "little") if number else b""

    def keys(self, keys: list[bytes]) -> list[bytes]:
        """The keys of this group's blocks, from the keys of their tokens."""
        return [key + self._suffix for key in keys] if self._suffix else keys

    def first_block(self, length: int) -> int:
        """Index of the first table entry that tokens after the first `length` ones attend to."""
        if self.window is None:
            return 0
        return max(length - self.window + 1, 0) // self.tables.block_size

    def trim(self, rows: NDArray[np.integer], lengths: NDArray[np.integer]) -> None:
        """Release the blocks that tokens after the first `lengths[i]` ones of each row do not attend to."""
        if self.window is not None:
            self.tables.trim(rows, np.maximum(lengths - self.window + 1, 0))

    def check_keys(self, row: int, keys: list[bytes], full: int) -> None:
        """Raise IntegrityError if a block of `row` is published under another key than its own, or too early.

        `keys` are those of its tokens, and its first `full` blocks are full.
        """
        keys = self.keys(keys)
        for index, block in enumerate(self.tables.held(row).tolist(), int(self.tables.firsts[row])):
            key = self.tables.pool.key_of(block)
            right = key is None or (index < full and key == keys[index])
            require(right, f"row {row}'s block {index} ({full} are full) has a key of other content")


def layer_groups(
    windows: Sequence[int | None], pool: BlockPool, *, block_size: int, max_rows: int, max_blocks: int
) -> list[LayerGroup]:
    """A group with tables of its own for each window."""
    if not windows:
        raise ValueError("there is at least one layer group")
    return [
        LayerGroup(
            number,
            window,
            BlockTables(pool, block_size=block_size, max_rows=max_rows, max_blocks=max_blocks),
        )
        for number, window in enumerate(windows)
    ]
