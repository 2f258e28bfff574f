"""What must hold between rows, their prefixes and the blocks of a paged memory."""

from collections.abc import Sequence

import numpy as np

from kvblocks.errors import require
from kvblocks.groups import LayerGroup
from kvblocks.pool import BlockPool
from kvblocks.prefix import Prefix


def check_references(tier: str, pool: BlockPool, holders: Sequence[int]) -> None:
    """Raise IntegrityError unless each block has as many references as it is named in `holders`."""
    held = np.bincount(np.array(holders, np.intp), minlength=pool.num_blocks)
    wrong = np.flatnonzero(held != pool.refcounts)
    require(
        wrong.size == 0,
        f"{tier} blocks {wrong.tolist()} have {pool.refcounts[wrong].tolist()} references "
        f"and are held {held[wrong].tolist()} times",
    )


def check_row(pool: BlockPool, group: LayerGroup, row: int, prefix: Prefix, computed: int) -> None:
    """Raise IntegrityError if blocks of an open row answer to keys that are not its own, or too early."""
    require(prefix.row == row, f"row {row} has a prefix that belongs to row {prefix.row}")
    full = computed // group.tables.block_size
    keys = group.keys(prefix.keys)
    first = int(group.tables.firsts[row])
    for index, block in enumerate(group.tables.held(row).tolist(), first):
        key = pool.key_of(block)
        right = key is None or (index < full and key == keys[index])
        require(right, f"row {row}'s block {index} ({full} are full) has a key of other content")
