"""KV cache blocks for paged attention: pool, prefix index and block tables. Needs numpy only."""

from kvblocks.errors import IntegrityError, OutOfBlocks
from kvblocks.events import AllCleared, BlockRemoved, BlockStored, CacheEvent
from kvblocks.hasher import Extra, PrefixHasher
from kvblocks.memory import PagedMemory
from kvblocks.pool import BlockPool, PoolStats
from kvblocks.prefix import CacheStats, Prefix
from kvblocks.tables import BlockTables, Changes

__all__ = [
    "AllCleared",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "BlockTables",
    "CacheEvent",
    "CacheStats",
    "Changes",
    "Extra",
    "IntegrityError",
    "OutOfBlocks",
    "PagedMemory",
    "PoolStats",
    "Prefix",
    "PrefixHasher",
]
