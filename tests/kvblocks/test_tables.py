import numpy as np
import pytest

from kvblocks import BlockPool, BlockTables, IntegrityError, OutOfBlocks


def make(num_blocks=8, block_size=4, max_rows=3, max_blocks=5):
    pool = BlockPool(num_blocks)
    return pool, BlockTables(pool, block_size=block_size, max_rows=max_rows, max_blocks=max_blocks)


def drained(tables):
    return [tuple(entry) for entry in np.stack(tables.drain_changes(), axis=1).tolist()]


def test_rows_start_empty():
    _, tables = make()
    assert tables.array.shape == (3, 5)
    assert (tables.array == -1).all()
    assert tables.counts.tolist() == [0, 0, 0]
    assert (tables.array.dtype, tables.counts.dtype) == (np.int32, np.int32)


def test_grow_takes_a_block_for_every_begun_block():
    pool, tables = make()
    assert tables.needed([2, 0], [9, 4]) == 4
    tables.grow([2, 0], [9, 4])
    assert tables.array.tolist() == [[3, -1, -1, -1, -1], [-1] * 5, [0, 1, 2, -1, -1]]
    assert tables.counts.tolist() == [1, 0, 3]
    assert pool.num_free == 4
    tables.check()


def test_grow_touches_only_rows_that_cross_a_boundary():
    pool, tables = make()
    tables.grow([0, 1], [3, 4])
    assert tables.needed([0, 1], [4, 4]) == 0
    tables.grow([0, 1], [4, 4])
    assert pool.num_free == 6
    tables.grow(np.array([0, 1], np.int64), np.array([4, 5], np.int32))
    assert tables.counts.tolist() == [1, 2, 0]
    tables.grow([0], [0])  # a shorter length gives nothing back
    assert tables.counts.tolist() == [1, 2, 0]
    assert tables.blocks([1, 0], [0, 0], [2, 1]).tolist() == [1, 2, 0]
    assert tables.blocks([0, 1], [1, 1], [1, 2]).tolist() == [2]


def test_grow_is_all_or_nothing():
    pool, tables = make(num_blocks=3)
    tables.grow([0], [4])
    with pytest.raises(OutOfBlocks) as caught:
        tables.grow([0, 1], [8, 8])
    assert (caught.value.requested, caught.value.free) == (3, 2)
    assert tables.counts.tolist() == [1, 0, 0]
    assert pool.num_free == 2
    tables.check()


def test_attach_begins_a_row_with_blocks_that_are_referenced():
    pool, tables = make()
    shared = pool.allocate(2)
    pool.share(shared)
    tables.attach(0, shared)
    tables.attach(1, shared)
    tables.grow([1], [9])
    assert tables.array[:2, :3].tolist() == [[0, 1, -1], [0, 1, 2]]
    tables.check()
    tables.free(0)
    assert pool.refcounts[:3].tolist() == [1, 1, 1]
    tables.free(1)
    assert pool.num_free == 8


def test_free_leaves_the_row_empty():
    pool, tables = make()
    tables.grow([1], [7])
    tables.free(1)
    tables.free(1)
    assert (tables.array == -1).all()
    assert tables.counts.tolist() == [0, 0, 0]
    assert pool.num_free == 8


def test_changes_are_the_entries_set_since_the_last_drain():
    _, tables = make()
    tables.grow([1, 0], [5, 2])
    changes = tables.drain_changes()
    assert [column.dtype for column in changes] == [np.int32] * 3
    assert changes.rows.tolist() == [0, 1, 1]
    assert changes.indices.tolist() == [0, 0, 1]
    assert changes.blocks.tolist() == [2, 0, 1]
    assert drained(tables) == []
    tables.grow([0, 1], [5, 8])
    assert drained(tables) == [(0, 1, 3)]


def test_a_freed_row_takes_its_changes_with_it():
    _, tables = make()
    tables.grow([0, 1], [8, 4])
    tables.free(0)
    assert drained(tables) == [(1, 0, 2)]
    tables.grow([0], [4])
    tables.free(0)
    tables.grow([0], [4])  # another sequence in the same row: told from the start
    assert drained(tables) == [(0, 0, 1)]
    tables.free(0)
    tables.grow([0], [8])
    assert drained(tables) == [(0, 0, 1), (0, 1, 0)]


def test_trim_gives_back_whole_blocks_before_a_token():
    pool, tables = make()
    tables.grow([0, 2], [17, 4])
    tables.trim([0, 2], [3, 0])
    assert pool.num_free == 2
    tables.trim(np.array([2, 0], np.int32), np.array([1, 11], np.int32))
    assert tables.array[0].tolist() == [-1, -1, 2, 3, 4]
    assert (tables.firsts.tolist(), tables.counts.tolist()) == ([2, 0, 0], [5, 0, 1])
    assert tables.held(0).tolist() == [2, 3, 4]
    assert pool.num_free == 4
    tables.check()
    tables.trim([0], [5])  # was trimmed further already
    tables.trim([0], [99])
    assert tables.held(0).size == 0
    tables.grow([0], [18])
    assert pool.num_free == 7  # the row's length stays what it was
    tables.free(0)
    assert tables.firsts[0] == 0
    tables.check()


def test_rows_that_share_a_block_leave_it_together():
    pool, tables = make()
    shared = pool.allocate(2)
    for row in (1, 2):
        pool.share(shared)
        tables.attach(row, shared)
    pool.release(shared)
    tables.trim([0, 1, 2], [0, 4, 8])
    assert pool.refcounts[:2].tolist() == [0, 1]
    tables.check()


def test_trimmed_entries_are_no_changes():
    _, tables = make()
    tables.grow([0], [12])
    tables.trim([0], [4])
    assert drained(tables) == [(0, 1, 1), (0, 2, 2)]
    tables.trim([0], [8])
    assert drained(tables) == []


def test_attach_may_leave_the_beginning_out():
    pool, tables = make()
    tables.attach(1, pool.allocate(2), 3)
    assert tables.array[1].tolist() == [-1, -1, -1, 0, 1]
    assert drained(tables) == [(1, 3, 0), (1, 4, 1)]
    assert tables.needed([1], [20]) == 0
    tables.check()
    tables.free(1)
    assert pool.num_free == 8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda tables: tables.grow([0], [21]), "row 0 would need 6 blocks, a row holds 5"),
        (lambda tables: tables.grow([1, 1], [4, 4]), "a row occurs twice"),
        (lambda tables: tables.trim([0, 0], [4, 4]), "a row occurs twice"),
        (lambda tables: tables.attach(1, [1, 2], 4), "6 blocks do not fit a row of 5"),
        (lambda tables: tables.grow([-1], [4]), "rows go from 0 to 2, not from -1"),
        (lambda tables: tables.attach(0, [1]), "row 0 holds 1 blocks already"),
        (lambda tables: tables.attach(1, [1] * 6), "6 blocks do not fit a row of 5"),
        (lambda tables: tables.attach(3, []), "rows go from 0 to 2, not 3"),
        (lambda tables: tables.free(-1), "rows go from 0 to 2, not -1"),
    ],
)
def test_mistakes_are_refused_and_change_nothing(call, message):
    pool, tables = make()
    tables.grow([0], [4])
    with pytest.raises(ValueError, match=message):
        call(tables)
    assert tables.counts.tolist() == [1, 0, 0]
    assert pool.num_free == 7
    tables.check()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"block_size": 0}, "block_size=0"),
        ({"max_rows": 0}, "max_rows=0"),
        ({"max_blocks": 0}, "max_blocks=0"),
        ({"block_size": 2**20, "max_blocks": 2**11}, "overflow a 32-bit length"),
    ],
)
def test_sizes_are_checked(sizes, message):
    with pytest.raises(ValueError, match=message):
        make(**sizes)


@pytest.mark.parametrize(
    ("row", "index", "block", "message"),
    [
        (0, 2, 5, "4 entries and count 3"),
        (0, 1, 0, "rows have 1 blocks more than once"),
        (1, 0, 8, r"have the blocks \[8\], which do not exist"),
        (1, 0, 0, r"blocks \[0\] are in \[2\] rows with \[1\] references"),
    ],
)
def test_check_sees_damage(row, index, block, message):
    _, tables = make()
    tables.grow([0, 1], [8, 4])
    tables.check()
    tables.array[row, index] = block
    with pytest.raises(IntegrityError, match=message):
        tables.check()
