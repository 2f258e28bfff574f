"""Prefix caching: keys of full blocks, a request's keys, and the search for its longest cached prefix."""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvblocks.pool import NO_MATCH, BlockPool
from kvblocks.tables import LayerGroup

# What else a key depends on (model, adapter, salt), by tag. Text stands for its UTF-8 bytes.
Extra = Mapping[str, bytes | str] | Sequence[tuple[str, bytes | str]]

_FORMAT = b"kvblocks-1"
_MAX_TOKEN = 2**31 - 1
_NONE = np.empty(0, np.int32)


class PrefixHasher:
    """Keys of full blocks: one running SHA-256 over `extra` and the tokens, digested at every full block.

    Two keys are equal only if extra keys, block size and all tokens up to the block's end are equal. They
    depend on nothing else, so they are the same in every process and run.

    `extra` is hashed sorted by tag, with tags and values length-prefixed, so that no value can be mistaken
    for another tag's, nor for tokens. A tag may occur twice; the order of its values then matters.
    """

    def __init__(self, block_size: int, extra: Extra = ()) -> None:
        if block_size < 1:
            raise ValueError(f"a block holds at least 1 token, not {block_size}")
        self.block_size = block_size
        self.num_tokens = 0
        self._state = hashlib.sha256(_header(block_size, extra))

    def extend(self, tokens: ArrayLike) -> list[bytes]:
        """Append `tokens` (int [n]); return the 32-byte keys of the blocks that became full, in order.

        Raises TypeError for anything but integers, ValueError for ids outside 0 to 2³¹ - 1.
        """
        data = _little_endian(tokens)
        block_bytes = 4 * self.block_size
        filled = 4 * (self.num_tokens % self.block_size)
        self.num_tokens += len(data) // 4
        update, copy = self._state.update, self._state.copy
        keys = []
        start = 0
        for end in range(block_bytes - filled, len(data) + 1, block_bytes):
            update(data[start:end])
            keys.append(copy().digest())
            start = end
        update(data[start:])
        return keys


def _little_endian(tokens: ArrayLike) -> bytes:
    """`tokens` as little-endian 32-bit integers."""
    ids = np.asarray(tokens)
    if ids.ndim != 1:
        raise ValueError(f"tokens are a list or a 1-d array, not of shape {ids.shape}")
    if ids.dtype != np.int32:
        ids = _narrow(ids)
    data = ids.astype("<i4", copy=False).tobytes()
    # A placeholder such as -1 must never be hashed: other requests have it at the same position. An id is
    # negative if its last byte is 128 or more, and bytes are compared ten times faster than short arrays.
    if not data[3::4].isascii():
        raise ValueError(f"token ids go from 0 to {_MAX_TOKEN}, not from {ids.min()}")
    return data


def _narrow(ids: NDArray[Any]) -> NDArray[np.int32]:
    if ids.size and ids.dtype.kind not in "iu":
        raise TypeError(f"tokens are integers, not {ids.dtype}")
    if ids.size and (ids.min() < 0 or ids.max() > _MAX_TOKEN):
        raise ValueError(f"token ids go from 0 to {_MAX_TOKEN}, not from {ids.min()} to {ids.max()}")
    return ids.astype(np.int32)


def tagged(extra: Extra) -> tuple[tuple[str, bytes], ...]:
    """`extra` as pairs of tag and bytes; TypeError if a tag is not text or a value neither bytes nor text."""
    pairs = []
    for tag, value in extra.items() if isinstance(extra, Mapping) else extra:
        data = value.encode() if isinstance(value, str) else value
        if not isinstance(tag, str) or not isinstance(data, bytes):
            raise TypeError(f"an extra key is a str tag and a bytes or str value, not {tag!r}: {value!r}")
        pairs.append((tag, data))
    return tuple(pairs)


def _header(block_size: int, extra: Extra) -> bytes:
    """The bytes hashed before the first token; no header is the beginning of another one."""
    pairs = sorted(tagged(extra), key=lambda pair: pair[0])
    parts = [_FORMAT, struct.pack("<II", block_size, len(pairs))]
    for tag, value in pairs:
        for part in (tag.encode(), value):
            parts += [struct.pack("<Q", len(part)), part]
    return b"".join(parts)


class HostCopy(NamedTuple):
    """Host blocks of a request that is swapped out.

    They hold its first `num_tokens` tokens: for each layer group the blocks (int32 [n]) of the table entries
    from `firsts[group]` on.
    """

    num_tokens: int
    firsts: tuple[int, ...]
    blocks: tuple[NDArray[np.int32], ...]


class Prefix:
    """Prefix-cache state of one request; made by `PagedMemory.prefix`, opaque to a scheduler.

    It lives as long as the request, through preemption too: the keys of blocks that generated tokens filled
    are added as they fill, and found again when the request resumes.

    - `num_tokens`: the tokens that the request came with, or those computed by the time its row was freed.
    - `row`: the row allocated to it, or -1.
    - `host_copy`: present while it is swapped out.
    - `device_match`: the leading run of blocks found on the device by the last search.
    - `host_match`: the run found on the host then, preceded by the index of its first block.
    - `counted`: whether the request needs no entry in `CacheStats` any more.
    """

    __slots__ = (
        "counted",
        "device_match",
        "hasher",
        "host_copy",
        "host_match",
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
        self.device_match = NO_MATCH
        self.host_match = 0, NO_MATCH

    def extend(self, tokens: NDArray[np.int32], length: int) -> None:
        """Hash those of `tokens[:length]` that are not hashed yet; `tokens` (int32 [n]) are the request's."""
        assert self.hasher is not None, "without prefix caching there are no keys"
        self.keys += self.hasher.extend(tokens[self.hasher.num_tokens : length])


class GroupHit(NamedTuple):
    """Cached blocks of one layer group, for the table entries from `first` on.

    `blocks` (int32 [n]) are device blocks, -1 for each that is to be swapped in: from `host_blocks` (int32),
    in order.
    """

    first: int
    blocks: NDArray[np.int32]
    host_blocks: NDArray[np.int32]

    @property
    def device_blocks(self) -> NDArray[np.int32]:
        """The blocks that are on the device."""
        return self.blocks[self.blocks >= 0] if self.host_blocks.size else self.blocks


class PrefixHit(NamedTuple):
    """The cached prefix of a request: `num_tokens` leading tokens, in the blocks of each layer group."""

    num_tokens: int
    groups: list[GroupHit]


def find_prefix_hit(
    prefix: Prefix, limit: int, groups: Sequence[LayerGroup], device: BlockPool, host: BlockPool | None
) -> PrefixHit:
    """The longest cached prefix of at most `limit` blocks on both tiers.

    For a request that was swapped out, its host copy, unless the prefix cache has more.
    """
    limit = min(limit, len(prefix.keys)) if prefix.reuse else 0
    if _full_attention_only(groups):
        hit = _leading_run(prefix, limit, groups[0], device, host)
    else:
        hit = _windowed_run(prefix, limit, groups, device, host)
    copy = prefix.host_copy
    if copy is None or copy.num_tokens <= hit.num_tokens:
        return hit
    return _swapped_out(prefix, copy, groups, device)


def _leading_run(
    prefix: Prefix, limit: int, group: LayerGroup, device: BlockPool, host: BlockPool | None
) -> PrefixHit:
    """A leading run of blocks on the device, and the run that follows it on the host."""
    keys = prefix.keys[:limit]
    prefix.device_match = device.rematch(keys, prefix.device_match)
    blocks, host_blocks = prefix.device_match.blocks, _NONE
    if host is not None and blocks.size < limit:
        start, match = prefix.host_match
        match = host.rematch(keys[blocks.size :], match if start == blocks.size else NO_MATCH)
        prefix.host_match = blocks.size, match
        host_blocks = match.blocks
        if host_blocks.size:
            blocks = np.concatenate((blocks, np.full(host_blocks.size, -1, np.int32)))
    return PrefixHit(blocks.size * group.tables.block_size, [GroupHit(0, blocks, host_blocks)])


def _windowed_run(
    prefix: Prefix, limit: int, groups: Sequence[LayerGroup], device: BlockPool, host: BlockPool | None
) -> PrefixHit:
    """The longest run of which every group has the blocks it needs: all of them, or those in its window."""
    keys = prefix.keys[:limit]
    on_device = [_lookup(device, group.keys(keys)) for group in groups]
    on_host = [_lookup(host, group.keys(keys)) for group in groups]
    missing = [(blocks < 0) & (host_blocks < 0) for blocks, host_blocks in zip(on_device, on_host)]
    count = limit
    while count:
        firsts = [group.first_block(count * group.tables.block_size) for group in groups]
        lacking = [lacks[first:count] for first, lacks in zip(firsts, missing)]
        # A shorter run that reaches beyond a missing block needs that block too.
        shorter = [first + int(lacks.argmax()) for first, lacks in zip(firsts, lacking) if lacks.any()]
        if not shorter:
            break
        count = min(shorter)
    hits = []
    for group, blocks, host_blocks in zip(groups, on_device, on_host):
        first = group.first_block(count * group.tables.block_size)
        blocks = blocks[first:count]
        hits.append(GroupHit(first, blocks, host_blocks[first:count][blocks < 0]))
    return PrefixHit(count * groups[0].tables.block_size, hits)


def _swapped_out(
    prefix: Prefix, copy: HostCopy, groups: Sequence[LayerGroup], device: BlockPool
) -> PrefixHit:
    """All tokens of the host copy: full blocks that are still on the device, and the others from the copy."""
    hits = []
    for group, first, stored in zip(groups, copy.firsts, copy.blocks):
        full = copy.num_tokens // group.tables.block_size
        if not prefix.reuse:
            cached = _NONE
        elif _full_attention_only(groups):
            cached = prefix.device_match.blocks[:full]
        else:
            cached = _lookup(device, group.keys(prefix.keys[first:full]))
        blocks = np.full(stored.size, -1, np.int32)
        blocks[: cached.size] = cached
        hits.append(GroupHit(first, blocks, stored[blocks < 0]))
    return PrefixHit(copy.num_tokens, hits)


def _full_attention_only(groups: Sequence[LayerGroup]) -> bool:
    """Whether there is one group and it has full attention, so that only a leading run can be a hit."""
    return len(groups) == 1 and groups[0].window is None


def _lookup(pool: BlockPool | None, keys: list[bytes]) -> NDArray[np.int32]:
    """The block of each key, int32 [n], -1 where there is none."""
    if pool is None:
        return np.full(len(keys), -1, np.int32)
    return np.fromiter(map(pool.lookup, keys), np.int32, len(keys))
