import numpy as np
import pytest

from kvblocks import BlockStored, IntegrityError, OutOfBlocks, PagedMemory

A = [1, 2, 3, 4, 5, 6, 7, 8]
B = [9, 9, 9, 9, 9, 9, 9, 9]


class Rig:
    """A memory of blocks of 4 tokens and the array of tokens that a scheduler keeps."""

    def __init__(self, num_blocks=8, **options):
        self.memory = PagedMemory(
            num_blocks=num_blocks, block_size=4, max_rows=3, max_blocks_per_row=6, **options
        )
        self.tokens = np.full((3, 24), -1, np.int32)

    def prefix(self, tokens, extra=(), **options):
        return self.memory.prefix(np.array(tokens, np.int32), extra, **options)

    def allocate(self, row, tokens, prefix=None):
        """Allocate `row` and blocks for `tokens`; returns the number of cached tokens and the prefix."""
        prefix = prefix or self.prefix(tokens)
        cached = self.memory.allocate(row, prefix)
        self.tokens[row, : len(tokens)] = tokens
        self.memory.grow([row], [len(tokens)])
        return cached, prefix

    def commit(self, row, length):
        self.memory.commit([row], [length], self.tokens)

    def run(self, tokens, extra=(), row=0):
        """Allocate, compute and free; returns the number of cached tokens."""
        cached, _ = self.allocate(row, tokens, self.prefix(tokens, extra))
        self.commit(row, len(tokens))
        self.memory.free(row)
        self.memory.check()
        return cached


def test_a_second_request_holds_the_blocks_of_the_first():
    rig = Rig()
    assert rig.allocate(0, [*A, 20])[0] == 0
    rig.commit(0, 9)
    assert rig.allocate(1, [*A, 30, 31])[0] == 8
    assert rig.memory.tables.array[:2, :3].tolist() == [[0, 1, 2], [0, 1, 3]]
    assert rig.memory.num_free == 4
    rig.memory.check()


@pytest.mark.parametrize(
    ("prompt", "hits"),
    [([], 0), (A[:1], 0), (A[:4], 0), (A[:5], 4), (A, 4), ([*A, 1], 8), ([*A, 1, 2, 3, 4], 8)],
)
def test_a_hit_is_whole_blocks_and_leaves_a_token_to_compute(prompt, hits):
    rig = Rig()
    assert [rig.run(prompt), rig.run(prompt), rig.run(prompt)] == [0, hits, hits]


def test_a_prompt_with_its_earlier_answer_holds_blocks_that_the_answer_filled():
    rig = Rig()
    rig.allocate(0, A[:5])
    for length in range(5, 9):
        rig.memory.grow([0], [length])
        rig.tokens[0, :length] = A[:length]
        rig.commit(0, length)
    rig.memory.free(0)
    assert rig.run([*A, 20, 21]) == 8


def test_a_block_is_found_once_a_step_that_fills_it_is_planned():
    rig = Rig()
    prefix = rig.prefix([*A, 20])
    assert rig.memory.allocate(0, prefix) == 0
    assert rig.memory.cached_tokens(rig.prefix([*A, 20])) == 0
    rig.memory.grow([0], [3])
    assert rig.memory.cached_tokens(rig.prefix([*A, 20])) == 0
    rig.memory.grow([0], [7])
    assert rig.memory.cached_tokens(rig.prefix([*A, 20])) == 4
    rig.memory.grow([0], [9])
    assert rig.allocate(1, [*A, 20])[0] == 8  # all of it in steps that are yet to be run
    assert rig.memory.tables.array[:2, :3].tolist() == [[0, 1, 2], [0, 1, 3]]
    rig.memory.free(0)  # aborted, after those steps
    rig.memory.check()
    assert rig.allocate(2, [*A, 20])[0] == 8


def test_a_block_whose_last_token_is_yet_to_be_sampled_is_found_once_that_is_committed():
    rig = Rig()
    rig.allocate(0, A[:6])
    rig.memory.grow([0], [8])  # two more steps are planned, or two drafts
    rig.commit(0, 6)
    assert rig.memory.cached_tokens(rig.prefix([*A, 20])) == 4
    rig.tokens[0, :8] = A
    rig.commit(0, 8)
    assert rig.memory.cached_tokens(rig.prefix([*A, 20])) == 8
    rig.memory.check()


def test_of_equal_blocks_in_one_step_the_first_is_found():
    rig = Rig()
    rig.memory.allocate(0, rig.prefix([*A, 20]))
    rig.memory.allocate(1, rig.prefix([*A, 20]))
    rig.memory.grow([1, 0], [9, 9])
    assert rig.memory.pool.match(rig.prefix(A).keys).tolist() == [0, 1]  # row 1's
    rig.memory.commit([0, 1], [9, 9], np.array([[*A, 20]] * 2, np.int32))
    rig.memory.check()


def test_a_chunk_may_fill_several_blocks():
    rig = Rig(record_events=True)
    prefix = rig.prefix([*A, *B, 20])
    rig.memory.allocate(0, prefix)
    rig.memory.grow([0], [2])
    assert rig.memory.pool.events() == []
    rig.memory.grow([0], [13])
    assert rig.memory.pool.events() == [
        BlockStored(0, prefix.keys[0]),
        BlockStored(1, prefix.keys[1]),
        BlockStored(2, prefix.keys[2]),
    ]
    rig.tokens[0, :17] = [*A, *B, 20]
    rig.commit(0, 13)
    assert rig.memory.pool.events() == []


def test_a_preempted_request_finds_what_it_had_published():
    rig = Rig()
    _, prefix = rig.allocate(0, A[:5])
    rig.tokens[0, :14] = [*A, *B][:14]
    rig.memory.grow([0], [13])
    rig.commit(0, 13)  # 3 full blocks and a token; the 14th token is not computed yet
    rig.memory.free(0)
    assert rig.memory.cached_tokens(prefix) == 12
    assert rig.allocate(2, [*A, *B][:14], prefix)[0] == 12
    rig.commit(2, 14)
    rig.memory.check()


def test_a_preempted_request_that_filled_its_block_leaves_a_token_to_compute():
    rig = Rig()
    _, prefix = rig.allocate(0, A)
    rig.commit(0, 8)
    rig.memory.free(0)
    assert rig.memory.cached_tokens(prefix) == 4


def test_a_request_preempted_twice_hashes_nothing_twice():
    rig = Rig()
    _, prefix = rig.allocate(0, A)
    rig.tokens[0, :16] = [*A, *B]
    rig.memory.grow([0], [16])
    rig.commit(0, 16)
    rig.memory.free(0)
    cold = rig.prefix([*A, *B]).keys
    for row in (1, 2):
        rig.allocate(row, [*A, *B], prefix)
        rig.commit(row, 16)
        rig.memory.free(row)
        assert prefix.keys == cold


def test_an_evicted_prompt_is_not_found():
    rig = Rig(num_blocks=4)
    assert rig.run([*A, 1, 1, 1, 1]) == 0
    assert rig.run([*B, 2, 2, 2, 2, 3, 3, 3, 3]) == 0
    assert rig.run([*A, 1, 1, 1, 1]) == 0
    assert rig.memory.num_free == 4


def test_extra_keys_and_salt_keep_requests_apart():
    rig = Rig(num_blocks=16)
    prompt = [*A, 1]
    assert rig.run(prompt) == 0
    assert rig.run(prompt, {"salt": "x"}) == 0
    assert rig.run(prompt, {"lora": "x"}) == 0
    assert rig.run(prompt, [("lora", b"x")]) == 8
    salted = Rig(salt={"model": "one"}).prefix(A).keys
    assert not set(salted) & set(rig.prefix(A).keys)
    assert not set(salted) & set(Rig(salt={"model": "two"}).prefix(A).keys)
    assert salted == Rig(salt=[("model", b"one")]).prefix(A).keys


def test_a_request_without_reuse_computes_everything_and_publishes_it():
    rig = Rig()
    rig.run([*A, 1])
    prefix = rig.prefix([*A, *B], reuse=False)
    assert rig.memory.cached_tokens(prefix) == 0
    assert rig.allocate(0, [*A, *B], prefix)[0] == 0
    rig.commit(0, 16)
    rig.memory.free(0)
    assert rig.memory.cached_tokens(rig.prefix([*A, *B])) == 12
    assert (rig.memory.stats.queries, rig.memory.stats.hits) == (9, 0)


def test_without_prefix_caching_nothing_is_hashed_or_found():
    rig = Rig(prefix_caching=False)
    assert rig.run([*A, 1]) == 0
    assert rig.run([*A, 1]) == 0
    assert rig.prefix(A).keys == []
    assert rig.memory.pool.stats.published == 0
    assert (rig.memory.stats.queries, rig.memory.stats.hits) == (0, 0)


def test_stats_count_tokens_once_a_request():
    rig = Rig()
    rig.run([*A, 1])
    _, prefix = rig.allocate(0, [*A, 2, 2])
    assert (rig.memory.stats.queries, rig.memory.stats.hits) == (19, 8)
    rig.memory.free(0)
    rig.allocate(1, [*A, 2, 2], prefix)  # back from preemption
    assert (rig.memory.stats.queries, rig.memory.stats.hits) == (19, 8)


def test_waste_is_what_is_allocated_and_not_computed():
    rig = Rig()
    assert rig.memory.waste == 0
    rig.allocate(0, A[:5])
    assert rig.memory.waste == 1
    rig.commit(0, 5)
    assert rig.memory.waste == 3 / 8
    rig.allocate(1, [*A[:4], 30])  # shares the first block: 3 blocks with 3 + 4 free slots
    assert rig.memory.waste == 7 / 12
    rig.memory.free(0)
    rig.commit(1, 5)
    assert rig.memory.waste == 3 / 8


def test_fits_does_not_count_cached_blocks_twice():
    rig = Rig(num_blocks=4)
    rig.run([*A, 1])  # blocks 0 and 1 are cached, 2 and 3 blank
    prefix = rig.prefix([*A, *B])
    assert rig.memory.num_free == 4
    assert rig.memory.fits(prefix, 16)
    assert not rig.memory.fits(prefix, 17)
    assert not rig.memory.fits(prefix, 16, reserve=1)
    assert rig.memory.fits(prefix, 12, reserve=1)
    rig.allocate(0, [*A, 1])  # holds 0 and 1, and takes a blank one
    assert rig.memory.fits(prefix, 12)
    assert not rig.memory.fits(prefix, 13)
    assert rig.memory.fits(prefix, 3, reserve=1)  # all cached and held: takes nothing
    assert not rig.memory.fits(prefix, 3, reserve=2)


def test_fits_refuses_a_length_beyond_a_row():
    rig = Rig(num_blocks=50)
    assert rig.memory.fits(rig.prefix(A), 24)
    assert not rig.memory.fits(rig.prefix(A), 25)


def test_a_prompt_beyond_a_row_gets_the_cached_blocks_that_the_row_can_hold():
    small = PagedMemory(num_blocks=9, block_size=2, max_rows=1, max_blocks_per_row=2)
    prefix = small.prefix(np.array(A, np.int32))
    small.pool.publish(small.pool.allocate(4), prefix.keys)
    assert small.allocate(0, prefix) == 4
    with pytest.raises(ValueError, match="row 0 would need 4 blocks, a row holds 2"):
        small.grow([0], [8])


def test_grow_runs_out_without_a_change():
    rig = Rig(num_blocks=4)
    rig.allocate(0, A)
    rig.allocate(1, B[:4])
    assert rig.memory.needed([0, 1], [9, 5]) == 2
    with pytest.raises(OutOfBlocks) as caught:
        rig.memory.grow([0, 1], [9, 5])
    assert (caught.value.requested, caught.value.free) == (2, 1)
    rig.memory.check()
    assert rig.memory.tables.counts.tolist() == [2, 1, 0]


def test_changes_cover_cached_blocks_and_new_ones():
    rig = Rig()
    rig.run([*A, 1])
    rig.memory.drain_changes()
    rig.allocate(2, [*A, 1])
    changes = rig.memory.drain_changes()
    assert [column.tolist() for column in changes] == [[2, 2, 2], [0, 1, 2], [0, 1, 2]]


def test_sizes():
    memory = Rig().memory
    assert (memory.block_size, memory.num_blocks, memory.num_free) == (4, 8, 8)
    assert [memory.blocks_for(length) for length in (0, 1, 4, 5, 24)] == [0, 1, 1, 2, 6]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda rig, prefix: rig.memory.allocate(0, rig.prefix(B)),
            "row 0 is allocated already",
        ),
        (
            lambda rig, prefix: rig.memory.allocate(3, rig.prefix(B)),
            "rows go from 0 to 2, not 3",
        ),
        (lambda rig, prefix: rig.memory.allocate(1, prefix), "this prefix is in use by row 0"),
        (lambda rig, prefix: rig.memory.grow([0, 1], [12, 4]), r"rows \[1\] are not allocated"),
        (lambda rig, prefix: rig.memory.grow([-3], [12]), "rows go from 0 to 2, not from -3"),
        (lambda rig, prefix: rig.memory.commit([1], [1], rig.tokens), r"rows \[1\] are not allocated"),
        (lambda rig, prefix: rig.memory.commit([0], [12], rig.tokens), r"rows \[0\] have computed more"),
        (lambda rig, prefix: rig.memory.free(2), r"rows \[2\] are not allocated"),
    ],
)
def test_mistakes_are_refused_and_change_nothing(call, message):
    rig = Rig()
    _, prefix = rig.allocate(0, A)
    with pytest.raises(ValueError, match=message):
        call(rig, prefix)
    rig.memory.check()
    assert rig.memory.num_free == 6
    assert rig.memory.pool.stats.published == 2


def test_a_placeholder_among_computed_tokens_is_refused():
    rig = Rig()
    rig.allocate(0, A[:5])
    rig.memory.grow([0], [8])
    with pytest.raises(ValueError, match="not from -1"):
        rig.commit(0, 8)


def leak(rig, _):
    rig.memory.pool.allocate(1)


def wrong_owner(rig, _):
    rig.memory.tables.array[0, 0] = 2


def freed_row(rig, _):
    rig.memory._rows.allocated[0] = False


def early_key(rig, prefix):
    rig.memory.grow([0], [12])
    rig.memory.pool.publish([2], [b"key"])


def stranger(rig, prefix):
    prefix.row = 1


@pytest.mark.parametrize("damage", [leak, wrong_owner, freed_row, early_key, stranger])
def test_check_sees_damage(damage):
    rig = Rig()
    _, prefix = rig.allocate(0, A)
    rig.commit(0, 5)
    rig.memory.check()
    damage(rig, prefix)
    with pytest.raises(IntegrityError):
        rig.memory.check()
