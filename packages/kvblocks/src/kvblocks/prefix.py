"""The cache keys of one request, from its arrival to its end."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvblocks.hasher import PrefixHasher


@dataclass(slots=True)
class CacheStats:
    """Tokens looked up in the prefix cache and tokens found there, once a request.

    A request that opens again after preemption finds its own blocks. That says nothing about sharing, so
    only its first opening counts.
    """

    queries: int = 0
    hits: int = 0


class Prefix:
    """What one request knows of its own cache keys; made by `PagedMemory.prefix`, opaque to a scheduler.

    It lives as long as the request does, through preemption too: the keys of blocks that generated tokens
    filled are added as they fill, and found again when the request comes back.

    `num_tokens` is how many tokens the request is known to have: those it came with, or those computed by
    the time its row was closed. `row` is the row it is open in, or -1.
    """

    __slots__ = ("counted", "hasher", "keys", "num_tokens", "reuse", "row")

    def __init__(self, tokens: NDArray[np.int32], hasher: PrefixHasher | None, *, reuse: bool) -> None:
        self.hasher = hasher
        self.keys = hasher.extend(tokens) if hasher else []
        self.num_tokens = len(tokens)
        self.reuse = reuse
        self.counted = hasher is None or not reuse
        self.row = -1

    def cover(self, tokens: NDArray[np.int32], length: int) -> None:
        """Hash what is not hashed yet of `tokens[:length]`, the request's own tokens (int32 [n ≥ length])."""
        assert self.hasher is not None, "without prefix caching there are no keys"
        self.keys += self.hasher.extend(tokens[self.hasher.num_tokens : length])
