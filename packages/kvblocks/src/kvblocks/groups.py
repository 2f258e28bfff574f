"""Layers that need the same part of the past, and the block table that they share."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvblocks.pool import BlockPool
from kvblocks.tables import BlockTables


class LayerGroup:
    """Layers with one block table: those with full attention, or those with a sliding window of one size.

    `window` is how many tokens a token attends to, itself included; None for all. All groups take their
    blocks from one pool, so a block must be as large for one group as for another. Blocks of different
    groups hold different things for the same tokens, and answer to different keys.
    """

    def __init__(self, number: int, window: int | None, tables: BlockTables) -> None:
        if window is not None and window < 1:
            raise ValueError(f"a window holds at least 1 token, not {window}")
        self.window = window
        self.tables = tables
        # Keys of tokens are 32 bytes, so these are no other group's.
        self._suffix = number.to_bytes(2, "little") if number else b""

    def keys(self, keys: list[bytes]) -> list[bytes]:
        """The keys of this group's blocks, by the keys of the tokens in them."""
        return [key + self._suffix for key in keys] if self._suffix else keys

    def first_block(self, length: int) -> int:
        """The first table entry that tokens after the first `length` ones need."""
        if self.window is None:
            return 0
        return max(length - self.window + 1, 0) // self.tables.block_size

    def trim(self, rows: NDArray[np.integer], lengths: NDArray[np.integer]) -> None:
        """Give back what tokens after the first `lengths[i]` ones of each row do not need."""
        if self.window is not None:
            self.tables.trim(rows, np.maximum(lengths - self.window + 1, 0))


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
