"""What happened to the prefix index, in order, so that a router can follow a cache from outside."""

from typing import NamedTuple


class BlockStored(NamedTuple):
    """`block` now answers to `key`."""

    block: int
    key: bytes


class BlockRemoved(NamedTuple):
    """`key` is forgotten: `block` was given to someone else, or the index was reset."""

    block: int
    key: bytes


class AllCleared(NamedTuple):
    """Every key is forgotten."""


CacheEvent = BlockStored | BlockRemoved | AllCleared
