"""Prompt lookup: drafts are what followed the last n-gram of a request where it stood before.

After Saxena, Prompt Lookup Decoding (2023), with n-grams found by hash tables instead of a search.
"""

import numpy as np
from numpy.typing import NDArray

from enginecore.core.drafts import Drafts
from enginecore.speculation import Speculation

_MOST_SLOT_BITS = 14
"""A row's table has at most 2**14 slots, 64 KiB: with longer requests, older n-grams are overwritten."""

_BASE = np.uint32(0x01000193)
"""FNV's prime for 32 bits: a token's factor is its power by the place in the n-gram."""

_SPREAD = np.uint32(0x9E3779B1)
"""2**32 divided by the golden ratio, which spreads values over the upper bits (Knuth, TAOCP 6.4)."""


class NgramProposer:
    """Tables of where each n-gram of a row's tokens stood last, for each of the sizes that are looked up.

    Each new token adds one entry to a table, so that a step costs as much with long requests as with short
    ones, and all rows are worked on together. Of the n-grams at the end of a row the longest that has stood
    before is taken, where it stood last. If the drafts reach the row's end they go on as what is repeated.
    """

    def __init__(self, speculation: Speculation, max_rows: int, max_len: int) -> None:
        self._count = speculation.num_speculative_tokens
        self._sizes = range(speculation.prompt_lookup_min, speculation.prompt_lookup_max + 1)
        self._factors = _BASE ** np.arange(self._sizes.stop - 1, dtype=np.uint32)
        bits = min(_MOST_SLOT_BITS, max(max_len - 1, 1).bit_length() + 1)
        self._shift = np.uint32(32 - bits)
        # Position after the n-gram, which is never 0; from zeroed memory that takes none until it is written.
        self._after = {size: np.zeros((max_rows, 1 << bits), np.int32) for size in self._sizes}
        self._num_indexed = np.zeros(max_rows, np.int32)
        """How many of a row's tokens have the n-grams that end with them in the tables."""

    def begin(self, row: int) -> None:
        """See `core.drafts.Proposer`."""
        if self._num_indexed[row]:
            for table in self._after.values():
                table[row] = 0
            self._num_indexed[row] = 0

    def propose(
        self, rows: NDArray[np.intp], tokens: NDArray[np.int32], num_tokens: NDArray[np.int32]
    ) -> Drafts:
        """See `core.drafts.Proposer`."""
        lengths = num_tokens[rows]
        found = self._look_up(rows, tokens, lengths)
        hit = np.flatnonzero(found)
        rows, lengths, found = rows[hit], lengths[hit], found[hit]
        steps = np.arange(self._count) % (lengths - found)[:, None]
        return Drafts(rows, tokens[rows[:, None], found[:, None] + steps])

    def _look_up(
        self, rows: NDArray[np.intp], tokens: NDArray[np.int32], lengths: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Return where each row's last n-gram was followed by something, 0 for nowhere; add it to the tables.

        That is, n-grams that end before the last token are added: the last ones wait for the next call, as
        nothing follows them yet.
        """
        # All positions whose n-grams are not in the tables: ends of each row one after another.
        starts = self._num_indexed[rows]
        counts = lengths - starts
        ends = np.cumsum(counts)
        each = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(len(each)) - (ends - counts - starts)[each]
        all_rows, last = rows[each], ends - 1
        self._num_indexed[rows] = lengths - 1
        found = np.zeros(len(rows), np.int32)
        hashed = np.zeros(len(each), np.uint32)
        for back in range(self._sizes.stop - 1):
            at = np.maximum(positions - back, 0)
            hashed += tokens[all_rows, at].view(np.uint32) * self._factors[back]
            size = back + 1
            if size not in self._sizes:
                continue
            slots = (hashed * _SPREAD) >> self._shift
            whole = positions >= back
            earlier = whole.copy()
            earlier[last] = False
            self._after[size][all_rows[earlier], slots[earlier]] = positions[earlier] + 1
            after = self._after[size][rows, slots[last]]
            after[~(whole[last] & _same(rows, tokens, after, lengths, size))] = 0
            found = np.where(after > 0, after, found)
        return found


def _same(
    rows: NDArray[np.intp],
    tokens: NDArray[np.int32],
    after: NDArray[np.int32],
    lengths: NDArray[np.int32],
    size: int,
) -> NDArray[np.bool_]:
    """Whether the `size` tokens before position `after` of each row are those at its end; bool [n]."""
    offsets = np.arange(-size, 0)
    then = tokens[rows[:, None], np.maximum(after[:, None] + offsets, 0)]
    now = tokens[rows[:, None], np.maximum(lengths[:, None] + offsets, 0)]
    return (then == now).all(axis=1)
