"""What a row would open with: blocks that are on the device already, and blocks that come from the host."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvblocks.groups import LayerGroup
from kvblocks.pool import NO_MATCH, BlockPool
from kvblocks.prefix import HostCopy, Prefix

_NOWHERE = np.empty(0, np.int32)


class Part(NamedTuple):
    """One layer group's share of an opening: its table entries from `first` on.

    `device` (int32 [n]) are blocks of the device, -1 for those that come from the host: from `host` (int32),
    in order.
    """

    first: int
    device: NDArray[np.int32]
    host: NDArray[np.int32]

    @property
    def hits(self) -> NDArray[np.int32]:
        """The blocks that are on the device."""
        return self.device[self.device >= 0] if self.host.size else self.device


class Opening(NamedTuple):
    """`num_tokens` leading tokens need no computing; a part for each layer group."""

    num_tokens: int
    parts: list[Part]


def find_opening(
    prefix: Prefix, limit: int, groups: Sequence[LayerGroup], device: BlockPool, host: BlockPool | None
) -> Opening:
    """The most that is known of the first `limit` blocks of `prefix`.

    A request that was swapped out has its copy, unless the cache has more of it.
    """
    limit = min(limit, len(prefix.keys)) if prefix.reuse else 0
    if _is_plain(groups):
        opening = _leading(prefix, limit, groups[0], device, host)
    else:
        opening = _windowed(prefix, limit, groups, device, host)
    copy = prefix.host_copy
    if copy is None or copy.num_tokens <= opening.num_tokens:
        return opening
    return _swapped(prefix, copy, groups, device)


def _leading(
    prefix: Prefix, limit: int, group: LayerGroup, device: BlockPool, host: BlockPool | None
) -> Opening:
    """A leading run of blocks on the device, and the run that follows it on the host."""
    keys = prefix.keys[:limit]
    prefix.found = device.rematch(keys, prefix.found)
    blocks, on_host = prefix.found.blocks, _NOWHERE
    if host is not None and blocks.size < limit:
        start, found = prefix.found_on_host
        earlier = found if start == blocks.size else NO_MATCH
        found = host.rematch(keys[blocks.size :], earlier)
        prefix.found_on_host = blocks.size, found
        on_host = found.blocks
        if on_host.size:
            blocks = np.concatenate((blocks, np.full(on_host.size, -1, np.int32)))
    return Opening(blocks.size * group.tables.block_size, [Part(0, blocks, on_host)])


def _windowed(
    prefix: Prefix, limit: int, groups: Sequence[LayerGroup], device: BlockPool, host: BlockPool | None
) -> Opening:
    """The longest run of which every group has the blocks it needs: all of them, or those in its window."""
    keys = prefix.keys[:limit]
    on_device = [_lookup(device, group.keys(keys)) for group in groups]
    on_host = [_lookup(host, group.keys(keys)) for group in groups]
    missing = [(ours < 0) & (theirs < 0) for ours, theirs in zip(on_device, on_host)]
    count = limit
    while count:
        firsts = [group.first_block(count * group.tables.block_size) for group in groups]
        lacking = [lacks[first:count] for first, lacks in zip(firsts, missing)]
        # A shorter run that reaches beyond a missing block needs that block too.
        shorter = [first + int(lacks.argmax()) for first, lacks in zip(firsts, lacking) if lacks.any()]
        if not shorter:
            break
        count = min(shorter)
    parts = []
    for group, ours, theirs in zip(groups, on_device, on_host):
        first = group.first_block(count * group.tables.block_size)
        blocks = ours[first:count]
        parts.append(Part(first, blocks, theirs[first:count][blocks < 0]))
    return Opening(count * groups[0].tables.block_size, parts)


def _swapped(prefix: Prefix, copy: HostCopy, groups: Sequence[LayerGroup], device: BlockPool) -> Opening:
    """All that was computed: full blocks that are still on the device, and the others from the copy."""
    parts = []
    for group, first, stored in zip(groups, copy.firsts, copy.blocks):
        full = copy.num_tokens // group.tables.block_size
        if not prefix.reuse:
            known = _NOWHERE
        elif _is_plain(groups):
            known = prefix.found.blocks[:full]
        else:
            known = _lookup(device, group.keys(prefix.keys[first:full]))
        blocks = np.full(stored.size, -1, np.int32)
        blocks[: known.size] = known
        parts.append(Part(first, blocks, stored[blocks < 0]))
    return Opening(copy.num_tokens, parts)


def _is_plain(groups: Sequence[LayerGroup]) -> bool:
    """Whether every layer attends to everything, so that a leading run of blocks is all there is to find."""
    return len(groups) == 1 and groups[0].window is None


def _lookup(pool: BlockPool | None, keys: list[bytes]) -> NDArray[np.int32]:
    """The block of each key, int32 [n], -1 where there is none."""
    if pool is None:
        return np.full(len(keys), -1, np.int32)
    return np.fromiter(map(pool.lookup, keys), np.int32, len(keys))
