"""Groups of layers with full attention and with sliding windows over one pool."""

import numpy as np
import pytest

from kvblocks import OutOfBlocks, PagedMemory

PROMPT = list(range(1, 22))


class Rig:
    """Blocks of 4 tokens; a token of the second group attends to itself and the 5 before it."""

    def __init__(self, num_blocks=16, windows=(None, 6), **options):
        self.memory = PagedMemory(
            num_blocks=num_blocks,
            block_size=4,
            max_rows=3,
            max_blocks_per_row=6,
            windows=windows,
            **options,
        )
        self.full, self.sliding = [group.tables for group in self.memory.groups]
        self.tokens = np.full((3, 24), -1, np.int32)

    def prefix(self, tokens):
        return self.memory.prefix(np.array(tokens, np.int32))

    def run(self, row, tokens, chunk=24, prefix=None):
        """Allocate a row and compute its tokens in chunks; returns the number of cached tokens."""
        known = self.memory.allocate(row, prefix or self.prefix(tokens))
        self.tokens[row, : len(tokens)] = tokens
        for end in [*range(known + chunk, len(tokens), chunk), len(tokens)]:
            self.memory.grow([row], [end])
            self.memory.commit([row], [end], self.tokens)
            self.memory.check()
        return known


def test_each_group_has_a_table_of_its_own():
    rig = Rig()
    rig.memory.allocate(0, rig.prefix(PROMPT[:6]))
    assert rig.memory.needed([0], [6]) == 4
    rig.memory.grow([0], [6])
    assert rig.full.array[0, :3].tolist() == [0, 1, -1]
    assert rig.sliding.array[0, :3].tolist() == [2, 3, -1]
    assert rig.memory.num_free == 12
    assert rig.memory.drain_changes(0).blocks.tolist() == [0, 1]
    assert rig.memory.drain_changes(1).blocks.tolist() == [2, 3]
    rig.memory.free(0)
    assert rig.memory.num_free == 16


@pytest.mark.parametrize(
    ("computed", "first"),
    # The next token is at position `computed` and reads from position `computed` - 5 on.
    [(5, 0), (8, 0), (9, 1), (12, 1), (13, 2), (17, 3)],
)
def test_blocks_that_the_window_has_left_are_given_back(computed, first):
    rig = Rig(prefix_caching=False)
    rig.run(0, PROMPT[:computed])
    blocks = -(-computed // 4)
    assert (rig.sliding.firsts[0], rig.sliding.counts[0]) == (first, blocks)
    assert rig.sliding.array[0, :first].tolist() == [-1] * first
    assert rig.full.firsts[0] == 0
    assert rig.memory.num_free == 16 - 2 * blocks + first


def test_a_long_prompt_in_chunks_needs_room_for_a_window_and_a_chunk():
    rig = Rig(num_blocks=6 + 3, prefix_caching=False)
    rig.run(0, PROMPT, chunk=4)
    assert rig.sliding.held(0).size == 2
    with pytest.raises(OutOfBlocks):
        Rig(num_blocks=6 + 3, prefix_caching=False).run(0, PROMPT, chunk=24)


def test_grow_is_all_or_nothing_over_groups():
    rig = Rig(num_blocks=5)
    rig.memory.allocate(0, rig.prefix(PROMPT))
    with pytest.raises(OutOfBlocks) as caught:
        rig.memory.grow([0], [12])
    assert (caught.value.requested, caught.value.free) == (6, 5)
    rig.memory.check()
    assert rig.full.counts[0] == rig.sliding.counts[0] == 0


def test_entries_before_the_window_are_not_announced():
    rig = Rig()
    rig.run(0, PROMPT)
    rig.memory.free(0)
    rig.memory.drain_changes(1)
    assert rig.memory.allocate(1, rig.prefix(PROMPT)) == 20
    assert rig.memory.drain_changes(0).indices.tolist() == [0, 1, 2, 3, 4]
    assert rig.memory.drain_changes(1).indices.tolist() == [3, 4]  # token 20 reads from position 15 on
    assert rig.sliding.firsts[1] == 3


def evict(rig, group, *indices):
    """Remove the keys of blocks of PROMPT, as eviction would."""
    keys = rig.memory.groups[group].keys(rig.prefix(PROMPT).keys)
    blocks = np.array([rig.memory.pool.lookup(keys[index]) for index in indices], np.int32)
    rig.memory.pool._cached.remove(blocks)
    rig.memory.pool._unpublish(blocks)
    rig.memory.pool._push_blank(blocks)
    rig.memory.check()


@pytest.mark.parametrize(
    ("full", "sliding", "hit"),
    [
        ([], [], 20),
        ([], [0, 1, 2], 20),  # outside the window of token 20
        ([], [3], 12),  # token 16 would need it as well; token 12 reads from position 7 on
        ([], [4], 16),
        ([], [1, 4], 16),  # token 16 reads from position 11 on
        ([], [2, 4], 8),
        ([2], [], 8),
        ([4], [3], 12),
        ([0], [], 0),
        ([], [0, 1, 4, 3], 0),  # token 12 needs block 1, token 8 and token 4 need block 0
    ],
)
def test_a_hit_is_good_for_all_groups(full, sliding, hit):
    rig = Rig()
    rig.run(0, PROMPT)
    rig.memory.free(0)
    evict(rig, 0, *full)
    evict(rig, 1, *sliding)
    assert rig.memory.cached_tokens(rig.prefix(PROMPT)) == hit
    assert rig.memory.allocate(2, rig.prefix(PROMPT)) == hit
    rig.memory.check()


def test_fits_counts_all_groups():
    rig = Rig(num_blocks=12)
    prefix = rig.prefix(PROMPT)
    assert rig.memory.fits(prefix, 24)
    assert not rig.memory.fits(prefix, 24, reserve=1)
    rig.run(0, PROMPT)
    rig.memory.free(0)
    # 20 tokens are known: all 5 blocks of one group, 2 of the other, and 5 blocks are neither.
    assert rig.memory.fits(prefix, 24, reserve=3)
    assert not rig.memory.fits(prefix, 24, reserve=4)


def test_a_windowed_row_is_swapped():
    rig = Rig(num_blocks=20, host_blocks=20)
    prefix = rig.prefix(PROMPT[:10])
    rig.run(0, PROMPT[:10], prefix=prefix)  # the window has left block 0
    assert rig.memory.swap_out(0)
    assert rig.memory.drain_copies().swap_out.sources.size == 3 + 2
    assert rig.memory.allocate(2, prefix) == 10
    assert rig.memory.drain_copies().swap_in.sources.size == 2  # the last block of each group
    assert rig.sliding.firsts[2] == 1
    rig.memory.check()


def every_chunking(length):
    """All ways of computing `length` tokens in steps: the tokens computed after each of them."""
    for cuts in range(2 ** (length - 1)):
        yield [end for end in range(1, length) if cuts >> (end - 1) & 1] + [length]


@pytest.mark.parametrize("windows", [(None,), (3,), (1,), (None, 3), (None, 2, 5)])
def test_blocks_for_is_the_most_that_any_chunking_of_a_request_holds(windows):
    for length in range(1, 10):
        most = 0
        for chunks in every_chunking(length):
            memory = PagedMemory(
                num_blocks=40,
                block_size=2,
                max_rows=1,
                max_blocks_per_row=6,
                windows=windows,
                prefix_caching=False,
            )
            tokens = np.arange(24, dtype=np.int32)[None]
            memory.allocate(0, memory.prefix(tokens[0, :length]))
            for end in chunks:
                memory.grow([0], [end])
                most = max(most, 40 - memory.num_free)
                memory.commit([0], [end], tokens)
        assert memory.blocks_for(length) == most


@pytest.mark.parametrize(
    ("windows", "message"), [((), "at least one layer group"), ((None, 0), "at least 1 token, not 0")]
)
def test_windows_are_checked(windows, message):
    with pytest.raises(ValueError, match=message):
        Rig(windows=windows)
