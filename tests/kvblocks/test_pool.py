import numpy as np
import pytest

from kvblocks import AllCleared, BlockPool, BlockRemoved, BlockStored, IntegrityError, OutOfBlocks
from kvblocks.pool import BLANK, CACHED, SHARED, USED

A, B, C, D = (bytes([n]) * 32 for n in range(4))


def cached(pool, keys):
    """Blocks with `keys`, computed and released as one sequence."""
    blocks = pool.allocate(len(keys))
    pool.publish(blocks, keys)
    pool.release(blocks)
    return blocks.tolist()


def test_every_block_is_usable():
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    assert blocks.tolist() == [0, 1, 2]
    assert blocks.dtype == np.int32
    assert (pool.num_blocks, pool.num_free, pool.usage) == (3, 0, 1.0)
    pool.release(blocks)
    assert (pool.num_free, pool.usage) == (3, 0.0)


def test_allocate_is_all_or_nothing():
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(OutOfBlocks, match="4 blocks were requested and 3 are free") as caught:
        pool.allocate(4)
    assert (caught.value.requested, caught.value.free) == (4, 3)
    assert pool.num_free == 3
    assert pool.allocate(3).tolist() == [1, 2, 3]
    assert pool.allocate(0).tolist() == []


def test_blank_blocks_are_reused_last_released_first_and_tail_first():
    pool = BlockPool(6)
    first, second = pool.allocate(3), pool.allocate(3)
    pool.release(first)
    pool.release(second)
    assert pool.allocate(6).tolist() == [5, 4, 3, 2, 1, 0]


def test_blank_blocks_go_before_cached_ones():
    pool = BlockPool(4)
    assert cached(pool, [A, B]) == [0, 1]
    assert pool.allocate(2).tolist() == [2, 3]
    assert pool.lookup(A) == 0
    assert pool.stats.evicted == 0
    assert pool.allocate(1).tolist() == [1]
    assert (pool.lookup(A), pool.lookup(B)) == (0, -1)
    assert pool.stats.evicted == 1


def test_cached_blocks_go_by_last_use_and_tail_before_head():
    pool = BlockPool(4)
    assert cached(pool, [A, B]) == [0, 1]
    assert cached(pool, [C, D]) == [2, 3]
    pool.share([0, 1])
    pool.release([0, 1])
    assert pool.allocate(4).tolist() == [3, 2, 1, 0]


def test_a_recycled_block_does_not_answer_to_its_old_key():
    pool = BlockPool(1)
    cached(pool, [A])
    block = pool.allocate(1)
    assert pool.lookup(A) == -1
    assert pool.key_of(0) is None
    pool.publish(block, [B])
    assert (pool.lookup(A), pool.lookup(B)) == (-1, 0)


def test_share_brings_a_cached_block_back():
    pool = BlockPool(2)
    cached(pool, [A, B])
    pool.share([0])
    assert pool.num_free == 1
    assert pool.refcounts.tolist() == [1, 0]
    assert pool.allocate(1).tolist() == [1]
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)


def test_a_shared_block_is_free_only_when_all_have_released_it():
    pool = BlockPool(2)
    block = pool.allocate(1)
    pool.share(block)
    assert pool.refcounts.tolist() == [2, 0]
    pool.release(block)
    assert pool.num_free == 1
    pool.release(block)
    assert pool.num_free == 2


def test_of_two_blocks_with_one_content_the_first_keeps_the_key():
    pool = BlockPool(2)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.publish(first, [A])
    pool.publish(second, [A])
    assert pool.lookup(A) == 0
    assert pool.key_of(1) is None
    assert pool.keys() == [A]
    pool.release([1])
    pool.release([0])
    assert pool.allocate(1).tolist() == [1]  # blank, though it was released first
    assert pool.stats.published == 1


def test_publishing_again_under_the_same_key_changes_nothing():
    pool = BlockPool(1, record_events=True)
    block = pool.allocate(1)
    pool.publish(block, [A])
    pool.publish(block, [A])
    assert pool.events() == [BlockStored(0, A)]


def test_match_ends_at_the_first_unknown_key():
    pool = BlockPool(4)
    cached(pool, [A, B, D])
    assert pool.match([A, B, C, D]).tolist() == [0, 1]
    assert pool.match([C, A]).tolist() == []
    assert pool.match([]).dtype == np.int32


def test_reset_forgets_what_nobody_holds():
    pool = BlockPool(3, record_events=True)
    cached(pool, [A, B, C])
    pool.share([0])
    pool.events()
    assert pool.reset() == 1
    assert [pool.lookup(key) for key in (A, B, C)] == [0, -1, -1]
    assert pool.num_free == 2
    assert pool.events() == [BlockRemoved(2, C), BlockRemoved(1, B)]
    pool.release([0])
    assert pool.reset() == 0
    assert pool.lookup(A) == -1
    assert pool.events() == [BlockRemoved(0, A), AllCleared()]
    pool.check()


def test_events_tell_what_the_index_went_through():
    pool = BlockPool(2, record_events=True)
    cached(pool, [A, B])
    pool.allocate(1)
    assert pool.events() == [BlockStored(0, A), BlockStored(1, B), BlockRemoved(1, B)]
    assert pool.events() == []


def test_events_are_refused_if_they_are_not_recorded():
    with pytest.raises(RuntimeError, match="record_events=True"):
        BlockPool(1).events()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pool: pool.allocate(-1), "cannot allocate -1 blocks"),
        (lambda pool: pool.share([3]), r"blocks \[3\] are free and have no content"),
        (lambda pool: pool.share([0, 0]), r"blocks \[0\] occur more than once"),
        (lambda pool: pool.share([4]), "from 0 to 3, not 4 to 4"),
        (lambda pool: pool.release([2, 1]), r"blocks \[2\] are released but have no reference"),
        (lambda pool: pool.release([0, 1, 0]), r"blocks \[0\] occur more than once"),
        (lambda pool: pool.release([-1]), "from 0 to 3, not -1 to -1"),
        (lambda pool: pool.release([[0, 1]]), r"not with shape \(1, 2\)"),
        (lambda pool: pool.publish([1, 0], [C, D]), "block 0 is published under another key"),
        (lambda pool: pool.publish([2], [C]), r"blocks \[2\] are published but have no reference"),
        (lambda pool: pool.publish([0, 1], [A]), "2 blocks cannot be published under 1 keys"),
        (lambda pool: pool.publish([1], [b""]), "a key is empty"),
    ],
)
def test_mistakes_are_refused_and_change_nothing(call, message):
    pool = BlockPool(4)  # block 0 is published and held, 1 is held, 2 is cached, 3 is blank
    pool.allocate(2)
    pool.publish([0], [A])
    cached(pool, [B])
    with pytest.raises(ValueError, match=message):
        call(pool)
    pool.check()
    assert pool.refcounts.tolist() == [1, 1, 0, 0]
    assert [pool.lookup(key) for key in (A, B, C, D)] == [0, 2, -1, -1]
    assert pool.num_free == 2


def test_refcounts_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        BlockPool(1).refcounts[0] = 1


def test_a_pool_has_blocks():
    with pytest.raises(ValueError, match="at least 1 block, not 0"):
        BlockPool(0)


def leak(pool):
    pool._refcounts[0] = 0


def double_owner(pool):
    pool._push_blank(np.array([0], np.int32))


def stale_key(pool):
    pool._index[A] = 1


def lost_key(pool):
    pool._index.pop(A)


def marked_without_key(pool):
    pool._published[1] = True


@pytest.mark.parametrize("damage", [leak, double_owner, stale_key, lost_key, marked_without_key])
def test_check_sees_damage(damage):
    pool = BlockPool(4)
    pool.publish(pool.allocate(1), [A])
    pool.check()
    damage(pool)
    with pytest.raises(IntegrityError):
        pool.check()


def test_a_match_is_looked_up_again_only_where_it_changed():
    pool = BlockPool(4)
    keys = [bytes([n]) * 32 for n in range(1, 5)]
    blocks = pool.allocate(3)
    pool.publish(blocks[:2], keys[:2])
    first = pool.rematch(keys)
    assert first.blocks.tolist() == [0, 1]
    assert pool.rematch(keys, first) is first
    pool.publish(blocks[2:], keys[2:3])
    longer = pool.rematch(keys, first)
    assert longer.blocks.tolist() == [0, 1, 2]
    pool.release(blocks)
    pool.allocate(2)  # the blank one, and block 2, which loses its key
    shorter = pool.rematch(keys, longer)
    assert shorter.blocks.tolist() == [0, 1]
    pool.allocate(1)  # block 1
    again = pool.allocate(1)  # block 0
    pool.publish(again, keys[1:2])  # another content in the same block
    assert pool.rematch(keys, shorter).blocks.tolist() == []
    assert pool.rematch(keys[1:]).blocks.tolist() == [0]


def test_whoever_asks_is_told_of_evictions():
    evicted = []
    pool = BlockPool(3, on_evict=lambda blocks, keys: evicted.append((blocks.tolist(), keys)))
    blocks = pool.allocate(3)
    pool.publish(blocks[:2], [b"a", b"b"])
    pool.release(blocks)
    pool.allocate(1)
    assert evicted == []
    pool.allocate(2)
    assert evicted == [([1, 0], [b"b", b"a"])]
    pool.reset()
    assert len(evicted) == 1


def test_states():
    pool = BlockPool(5)
    assert pool.states().tolist() == [BLANK] * 5
    one, two, three = pool.allocate(3).tolist()
    pool.publish([one, two], [b"1", b"2"])
    pool.share([two])
    pool.release([one])
    states = pool.states()
    assert states.dtype == np.int8
    assert {one: CACHED, two: SHARED, three: USED} == {block: states[block] for block in (one, two, three)}
    assert np.count_nonzero(states == BLANK) == 2
    pool.release([two])
    assert pool.states()[two] == USED
