"""KV cache blocks for paged attention: pool, prefix index and block tables. Needs numpy only."""

from kvblocks.errors import IntegrityError, OutOfBlocks
from kvblocks.events import AllCleared, BlockRemoved, BlockStored, CacheEvent
from kvblocks.groups import LayerGroup
from kvblocks.hasher import Extra, PrefixHasher
from kvblocks.memory import PagedMemory
from kvblocks.pool import BlockPool, Match
from kvblocks.prefix import Prefix
from kvblocks.stats import CacheStats, PoolStats
from kvblocks.tables import BlockTables, TableChanges
from kvblocks.transfers import BlockCopies, CopyList

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
