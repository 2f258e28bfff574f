"""The cache keys of one request, from its arrival to its end."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvblocks.hasher import PrefixHasher
from kvblocks.pool import NO_MATCH


class HostCopy(NamedTuple):
    """What a request has in the host tier while it is swapped out.

    `num_tokens` tokens; of each layer group the host blocks (int32 [n]) of the table entries from
    `firsts[group]` on.
    """

    num_tokens: int
    firsts: tuple[int, ...]
    blocks: tuple[NDArray[np.int32], ...]


class Prefix:
    """What one request knows of its own cache keys; made by `PagedMemory.prefix`, opaque to a scheduler.

    It lives as long as the request does, through preemption too: the keys of blocks that generated tokens
    filled are added as they fill, and found again when the request comes back.

    `num_tokens` is how many tokens the request is known to have: those it came with, or those computed by
    the time its row was closed. `row` is the row it is open in, or -1. `host_copy` is there while it is
    swapped out. `found` is the leading run of blocks found on the device the last time somebody looked, and
    `found_on_host` the run found on the host, from the block on that it names first.
    """

    __slots__ = (
        "counted",
        "found",
        "found_on_host",
        "hasher",
        "host_copy",
        "keys",
        "num_tokens",
        "reuse",
        "row",
    )

    def __init__(
        self, keys: list[bytes], num_tokens: int, hasher: PrefixHasher | None, *, reuse: bool
    ) -> None:
        self.hasher = hasher
        self.keys = keys
        self.num_tokens = num_tokens
        self.reuse = reuse
        self.counted = hasher is None or not reuse
        self.row = -1
        self.host_copy: HostCopy | None = None
        self.found = NO_MATCH
        self.found_on_host = 0, NO_MATCH

    def cover(self, tokens: NDArray[np.int32], length: int) -> None:
        """Hash what is not hashed yet of `tokens[:length]`, the request's own tokens (int32 [n ≥ length])."""
        assert self.hasher is not None, "without prefix caching there are no keys"
        self.keys += self.hasher.extend(tokens[self.hasher.num_tokens : length])
