"""Swapping rows out and in, and keeping evicted prefixes, on the host tier."""

import numpy as np
import pytest

from kvblocks import IntegrityError, OutOfBlocks, PagedMemory

A = [1, 2, 3, 4, 5, 6, 7, 8]
B = [9, 9, 9, 9, 9, 9, 9, 9]
NOTHING = {"swap_out": [], "swap_in": []}


class Rig:
    """A memory of blocks of 4 tokens with a host tier, and the array of tokens that a scheduler keeps."""

    def __init__(self, num_blocks=4, host_blocks=4, **options):
        self.memory = PagedMemory(
            num_blocks=num_blocks,
            block_size=4,
            max_rows=3,
            max_blocks_per_row=6,
            host_blocks=host_blocks,
            **options,
        )
        self.tokens = np.full((3, 24), -1, np.int32)

    def prefix(self, tokens, **options):
        return self.memory.prefix(np.array(tokens, np.int32), **options)

    def run(self, row, tokens, prefix=None):
        """Allocate a row and compute its tokens; returns the number of cached tokens, and the prefix."""
        prefix = prefix or self.prefix(tokens)
        known = self.memory.allocate(row, prefix)
        self.memory.grow([row], [len(tokens)])
        self.tokens[row, : len(tokens)] = tokens
        self.memory.commit([row], [len(tokens)], self.tokens)
        return known, prefix

    def copies(self):
        """The pending copies, as pairs of source and destination."""
        copies = self.memory.drain_copies()
        self.memory.check()
        assert [ids.dtype for part in copies for ids in part] == [np.int32] * 4
        assert copies.num_blocks == sum(part.sources.size for part in copies)
        return {
            name: list(zip(part.sources.tolist(), part.destinations.tolist()))
            for name, part in zip(copies._fields, copies)
        }


def test_a_row_comes_back_with_all_that_it_had_computed():
    rig = Rig()
    _, prefix = rig.run(0, [*A, 20])
    assert rig.memory.swap_out(0)
    assert rig.memory.num_free == 4
    assert rig.copies() == {**NOTHING, "swap_out": [(0, 0), (1, 1), (2, 2)]}
    rig.run(1, [*B, 1, 1, 1, 1, 2])  # takes all four blocks
    assert not rig.memory.fits(prefix, 9)
    rig.memory.free(1)
    rig.copies()
    assert rig.memory.fits(prefix, 10)
    assert rig.memory.allocate(2, prefix) == 9
    copies = rig.copies()
    blocks = rig.memory.tables.array[2, :3].tolist()
    assert copies["swap_in"] == [(0, blocks[0]), (1, blocks[1]), (2, blocks[2])]
    assert rig.memory.pool.match(prefix.keys).tolist() == blocks[:2]  # others may share them again


def test_blocks_that_are_still_on_the_device_are_not_copied_back():
    rig = Rig()
    _, prefix = rig.run(0, [*A, 20])
    rig.memory.swap_out(0)
    rig.copies()
    assert rig.memory.allocate(0, prefix) == 9
    assert rig.memory.tables.array[0, :3].tolist() == [0, 1, 2]
    assert rig.copies() == {**NOTHING, "swap_in": [(2, 2)]}  # the block that was not full has no key


def test_what_is_on_the_host_by_its_key_is_not_copied_there_again():
    rig = Rig(host_blocks=6)
    _, prefix = rig.run(0, [*A, 20])
    rig.memory.swap_out(0)
    rig.copies()
    rig.memory.allocate(0, prefix)
    rig.memory.grow([0], [13])
    rig.tokens[0, :13] = [*A, 20, 21, 22, 23, 24]
    rig.memory.commit([0], [13], rig.tokens)
    rig.copies()
    assert rig.memory.swap_out(0)
    assert [source for source, _ in rig.copies()["swap_out"]] == [2, 3]


def test_blocks_grown_ahead_of_the_computed_ones_are_not_copied():
    rig = Rig()
    _, prefix = rig.run(0, A[:3])
    rig.memory.grow([0], [14])
    rig.memory.swap_out(0)
    assert rig.copies()["swap_out"] == [(0, 0)]
    assert rig.memory.allocate(0, prefix) == 3


def test_without_room_on_the_host_nothing_changes():
    rig = Rig(host_blocks=2)
    rig.run(0, [*A, 20])
    assert not rig.memory.swap_out(0)
    rig.memory.check()
    assert rig.memory.num_free == 1
    assert rig.copies() == NOTHING
    assert rig.memory.tables.array[0, :3].tolist() == [0, 1, 2]


def test_without_a_host_tier_nothing_is_swapped():
    rig = Rig(host_blocks=0)
    rig.run(0, A)
    assert rig.memory.host_pool is None
    assert not rig.memory.swap_out(0)
    assert rig.memory.num_free == 2
    rig.memory.free(0)
    rig.run(0, [*B, *B])  # evicts
    assert rig.copies() == NOTHING


def test_a_request_that_ends_while_swapped_out_gives_its_blocks_back():
    rig = Rig(prefix_caching=False)
    _, prefix = rig.run(0, [*A, 20])
    rig.memory.swap_out(0)
    rig.copies()
    assert rig.memory.host_pool.num_free == 1
    rig.memory.discard(prefix)
    rig.memory.discard(prefix)
    rig.memory.check()
    assert rig.memory.host_pool.num_free == 4
    assert rig.memory.allocate(0, prefix) == 0


def test_host_blocks_are_not_reused_before_they_are_read():
    rig = Rig(num_blocks=8, host_blocks=2, prefix_caching=False)
    _, one = rig.run(0, A)
    rig.run(1, B)
    rig.memory.swap_out(0)
    rig.copies()
    rig.memory.allocate(0, one)  # to be read from host blocks 0 and 1
    assert not rig.memory.swap_out(1)
    rig.copies()
    assert rig.memory.swap_out(1)


def test_a_row_that_waits_for_copies_stays_on_the_device():
    rig = Rig(num_blocks=8, host_blocks=8, prefix_caching=False)
    _, prefix = rig.run(0, A)
    rig.memory.swap_out(0)
    rig.memory.allocate(0, prefix)
    assert not rig.memory.swap_out(0)
    rig.copies()
    assert rig.memory.swap_out(0)


def test_a_device_block_is_not_reused_before_it_is_written():
    rig = Rig(num_blocks=2, prefix_caching=False)
    _, prefix = rig.run(0, A)
    rig.memory.swap_out(0)
    rig.memory.allocate(0, prefix)
    rig.memory.free(0)  # aborted before its step
    assert rig.memory.num_free == 0
    assert rig.copies() == {**NOTHING, "swap_out": [(0, 0), (1, 1)], "swap_in": [(0, 1), (1, 0)]}
    assert rig.memory.num_free == 2


def test_allocate_takes_no_blocks_when_there_are_too_few():
    rig = Rig()
    _, prefix = rig.run(0, [*A, 20])
    rig.memory.swap_out(0)
    rig.copies()
    rig.run(1, B)
    rig.run(2, [7] * 4)
    assert not rig.memory.fits(prefix, 9)
    with pytest.raises(OutOfBlocks) as caught:
        rig.memory.allocate(0, prefix)
    assert (caught.value.requested, caught.value.free) == (2, 0)  # block 0 is there, and is the free one
    rig.memory.check()
    rig.memory.free(2)
    rig.memory.free(1)
    assert rig.memory.allocate(0, prefix) == 9


def test_a_request_without_reuse_gets_its_own_blocks_back():
    rig = Rig()
    prefix = rig.prefix([*A, 20], reuse=False)
    rig.run(0, [*A, 20], prefix)
    rig.memory.swap_out(0)
    rig.copies()
    assert rig.memory.allocate(0, prefix) == 9
    assert len(rig.copies()["swap_in"]) == 3


def test_an_evicted_prefix_is_restored():
    rig = Rig()
    rig.run(0, [*A, 1])
    rig.memory.free(0)
    rig.run(0, [*B, *B])
    assert rig.copies() == {**NOTHING, "swap_out": [(0, 0), (1, 1)]}
    rig.memory.free(0)
    prefix = rig.prefix([*A, 2])
    assert rig.memory.cached_tokens(prefix) == 8
    assert rig.memory.fits(prefix, 16)
    assert not rig.memory.fits(prefix, 17)
    assert rig.memory.allocate(1, prefix) == 8
    assert [source for source, _ in rig.copies()["swap_in"]] == [0, 1]
    assert rig.memory.stats.restored == 8
    assert rig.memory.stats.hits == 8


def test_the_most_recent_prefix_is_kept_where_there_is_room_for_one():
    rig = Rig(host_blocks=2)
    rig.run(0, A)
    rig.memory.free(0)
    rig.run(0, B)
    rig.memory.free(0)
    rig.run(0, [7] * 16)
    assert [source for source, _ in rig.copies()["swap_out"]] == [2, 3]
    rig.memory.free(0)
    assert rig.memory.cached_tokens(rig.prefix([*B, 1])) == 8
    assert rig.memory.cached_tokens(rig.prefix([*A, 1])) == 0


def test_rows_swapped_out_take_the_place_of_evicted_prefixes():
    rig = Rig(host_blocks=3)
    rig.run(0, A)
    rig.memory.free(0)
    rig.run(0, [*B, 1, 1, 1, 1])
    rig.copies()
    assert rig.memory.swap_out(0)
    rig.copies()
    assert rig.memory.host_pool.num_free == 0
    assert rig.memory.cached_tokens(rig.prefix([*A, 1])) == 4  # the first block is on the device


def test_reset_clears_both_tiers():
    rig = Rig()
    rig.run(0, [*A, 1])
    rig.memory.free(0)
    rig.run(0, [*B, *B])
    rig.memory.free(0)
    rig.copies()
    assert rig.memory.reset() == 0
    assert rig.memory.cached_tokens(rig.prefix([*A, 1])) == 0
    assert rig.memory.cached_tokens(rig.prefix([*B, 1])) == 0
    assert rig.memory.host_pool.num_free == 4


def test_reset_counts_what_swapped_requests_hold():
    rig = Rig()
    rig.run(0, [*A, 1])
    rig.memory.swap_out(0)
    rig.copies()
    assert rig.memory.reset() == 2


def test_check_sees_a_leak_on_the_host():
    rig = Rig()
    rig.memory.host_pool.allocate(1)
    with pytest.raises(IntegrityError, match=r"blocks \[0\] have \[1\] references and are held \[0\] times"):
        rig.memory.check()
