"""KV cache blocks for paged attention: pool, prefix cache and block tables. Needs numpy only."""

from kvblocks.errors import IntegrityError, OutOfBlocks
from kvblocks.host import BlockCopies, CopyList
from kvblocks.memory import CacheStats, PagedMemory
from kvblocks.pool import AllCleared, BlockPool, BlockRemoved, BlockStored, CacheEvent, Match, PoolStats
from kvblocks.prefix import Extra, Prefix, PrefixHasher
from kvblocks.tables import BlockTables, LayerGroup, TableChanges

__all__ = [
    "AllCleared",
    "BlockCopies",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "BlockTables",
    "CacheEvent",
    "CacheStats",
    "CopyList",
    "Extra",
    "IntegrityError",
    "LayerGroup",
    "Match",
    "OutOfBlocks",
    "PagedMemory",
    "PoolStats",
    "Prefix",
    "PrefixHasher",
    "TableChanges",
]
