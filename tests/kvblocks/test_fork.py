import numpy as np
import pytest

from kvblocks import OutOfBlocks, PagedMemory

A = [1, 2, 3, 4, 5, 6, 7, 8]


class Rig:
    def __init__(self, num_blocks=8, **options):
        self.memory = PagedMemory(
            num_blocks=num_blocks, block_size=4, max_rows=3, max_blocks_per_row=6, **options
        )
        self.tokens = np.full((3, 24), -1, np.int32)

    def run(self, row, tokens):
        """Compute a row up to `tokens`; opens it if it is not open."""
        if not self.memory.tables.counts[row]:
            self.memory.open(row, self.memory.prefix(np.array(tokens, np.int32)))
        self.memory.grow([row], [len(tokens)])
        self.tokens[row, : len(tokens)] = tokens
        self.memory.computed([row], [len(tokens)], self.tokens)

    def copies(self):
        copies = self.memory.drain_copies()
        self.memory.check()
        assert not copies.out.sources.size
        assert not copies.in_.sources.size
        return list(zip(copies.copy.sources.tolist(), copies.copy.destinations.tolist()))


def test_full_blocks_are_shared_and_the_last_is_copied_before_anyone_writes_to_it():
    rig = Rig()
    rig.run(0, [*A, 20])
    rig.memory.fork(0, 1)
    assert rig.memory.tables.array[:2, :3].tolist() == [[0, 1, 2], [0, 1, 3]]
    assert rig.memory.pool.refcounts[:2].tolist() == [2, 2]
    assert rig.copies() == [(2, 3)]
    assert rig.copies() == []
    assert rig.memory.num_free == 4
    changes = rig.memory.drain_changes()
    assert changes.rows.tolist() == [0, 0, 0, 1, 1, 1]


def test_full_blocks_alone_need_no_copy():
    rig = Rig(num_blocks=2)
    rig.run(0, A)
    rig.memory.fork(0, 2)
    assert rig.copies() == []
    assert rig.memory.tables.array[2, :2].tolist() == [0, 1]
    rig.memory.close(0)
    assert rig.memory.num_free == 0
    rig.memory.close(2)
    assert rig.memory.num_free == 2


def test_a_copy_of_a_copy_that_is_due_is_taken_from_the_first():
    rig = Rig()
    rig.run(0, A[:5])
    rig.memory.fork(0, 1)
    rig.memory.fork(1, 2)
    assert rig.copies() == [(1, 2), (1, 3)]


def test_the_source_of_a_copy_is_not_reused_before_it_is_read():
    rig = Rig(num_blocks=3)
    rig.run(0, A[:5])
    rig.memory.fork(0, 1)
    rig.memory.close(0)
    assert rig.memory.num_free == 0
    assert rig.copies() == [(1, 2)]
    assert rig.memory.num_free == 1


def test_forks_that_go_different_ways_find_their_own_blocks_again():
    rig = Rig()
    rig.run(0, A[:6])
    prefix = rig.memory.fork(0, 1)
    rig.copies()
    rig.run(0, [*A, 1])
    rig.run(1, [*A[:6], 30, 31, 32])
    rig.memory.close(0)
    rig.memory.close(1)
    other = rig.memory.prefix(np.array([*A[:6], 30, 31, 32, 33], np.int32))
    assert prefix.keys == other.keys
    assert rig.memory.cached_tokens(other) == 8
    assert rig.memory.open(2, prefix) == 8
    rig.memory.check()


def test_blocks_beyond_what_is_computed_are_not_shared():
    rig = Rig()
    rig.run(0, A)
    rig.memory.grow([0], [13])
    rig.memory.fork(0, 1)
    assert rig.memory.tables.counts.tolist() == [4, 2, 0]


def test_forks_are_no_lookups():
    rig = Rig()
    rig.run(0, A)
    rig.memory.fork(0, 1)
    assert rig.memory.stats.queries == 8


def test_a_fork_without_prefix_caching_shares_as_well():
    rig = Rig(prefix_caching=False)
    rig.run(0, [*A, 20])
    rig.memory.fork(0, 1)
    assert rig.memory.tables.array[1, :3].tolist() == [0, 1, 3]
    assert rig.copies() == [(2, 3)]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda memory: memory.fork(0, 1), OutOfBlocks, "1 blocks were asked for and 0 are free"),
        (lambda memory: memory.fork(0, 0), ValueError, "row 0 is open already"),
        (lambda memory: memory.fork(1, 2), ValueError, r"rows \[1\] are not open"),
        (lambda memory: memory.fork(2, 1), ValueError, "row 2 has computed 0 of 4 tokens"),
    ],
)
def test_mistakes_are_refused_and_change_nothing(call, error, message):
    rig = Rig(num_blocks=2)
    rig.run(0, A[:5])
    rig.memory.open(2, rig.memory.prefix(np.array([9] * 4, np.int32)))
    with pytest.raises(error, match=message):
        call(rig.memory)
    rig.memory.check()
    assert rig.memory.pool.refcounts.tolist() == [1, 1]
    assert rig.copies() == []
