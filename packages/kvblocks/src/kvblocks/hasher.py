"""Keys for full blocks, each of which covers everything up to the end of its block."""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

# What else a key depends on (model, adapter, salt), by tag. Text stands for its UTF-8 bytes.
Extra = Mapping[str, bytes | str] | Sequence[tuple[str, bytes | str]]

_FORMAT = b"kvblocks-1"
_MAX_TOKEN = 2**31 - 1


class PrefixHasher:
    """One running SHA-256 over `extra` and the tokens, read off at every full block.

    Two keys are equal only if extra keys, block size and all tokens up to the block's end are equal. They
    depend on nothing else, so they are the same in every process and run.

    `extra` enters sorted by tag, with tags and values length-prefixed, so that no value can be mistaken for
    another tag's, nor for tokens. A tag may come twice; the order of its values then matters.
    """

    def __init__(self, block_size: int, extra: Extra = ()) -> None:
        if block_size < 1:
            raise ValueError(f"a block holds at least 1 token, not {block_size}")
        self.block_size = block_size
        self.num_tokens = 0
        self._state = hashlib.sha256(_header(block_size, extra))

    def extend(self, tokens: ArrayLike) -> list[bytes]:
        """Append `tokens` (int [n]) and return the 32-byte keys of the blocks that became full, in order.

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
        raise ValueError(f"tokens come as a list or a 1-d array, not with shape {ids.shape}")
    if ids.dtype != np.int32:
        ids = _narrow(ids)
    data = ids.astype("<i4", copy=False).tobytes()
    # A placeholder such as -1 must never be hashed: other requests have it in the same place. An id is
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
