from typing import Any

import pytest
import torch

from pagedattn import AttentionBatch, build_batch


def test_build_batch_counts_back_from_the_end_of_each_sequence():
    batch = build_batch([1, 1, 3], [5, 1, 6], [[7, 2], [4], [0, 9]], block_size=4)
    assert batch.query_starts.tolist() == [0, 1, 2, 5]
    assert batch.lengths.tolist() == [5, 1, 6]
    assert batch.block_table.tolist() == [[7, 2], [4, -1], [0, 9]]
    # Position 4 is the first of block 2; position 0 the first of 4; 3, 4, 5 lie in blocks 0, 9, 9.
    assert batch.slots.tolist() == [8, 16, 3, 36, 37]
    assert (batch.max_query, batch.max_length, batch.num_decodes) == (3, 6, 2)
    assert (batch.num_seqs, batch.num_tokens) == (3, 5)


def test_only_leading_single_queries_are_decodes():
    assert build_batch([2, 1], [2, 5], [[0], [1, 2]], block_size=4).num_decodes == 0


def test_a_prefix_is_shared_as_far_as_whole_blocks_before_every_query_are_the_same():
    tables = [[7, 2, 5, 1], [7, 2, 6], [7, 2, 5]]
    assert build_batch([1, 1, 3], [14, 9, 12], tables, block_size=4).shared_prefix == 8
    # The last sequence's queries begin at position 7, in its second block.
    assert build_batch([1, 1, 5], [14, 9, 12], tables, block_size=4).shared_prefix == 4
    assert build_batch([1, 1], [14, 9], [[7, 2, 5, 1], [3, 2, 6]], block_size=4).shared_prefix == 0


def test_sequences_without_queries_do_not_count_for_the_shared_prefix():
    assert build_batch([1, 0, 1], [9, 4, 9], [[7, 2, 5], [1], [7, 2, 6]], block_size=4).shared_prefix == 8
    assert build_batch([1, 0], [9, 9], [[7, 2, 5], [7, 2, 5]], block_size=4).shared_prefix == 0


def test_a_batch_may_be_empty():
    batch = build_batch([], [], [], block_size=4)
    assert (batch.num_seqs, batch.num_tokens, batch.max_query, batch.num_decodes) == (0, 0, 0, 0)


def test_more_queries_than_tokens_are_refused():
    with pytest.raises(ValueError, match="sequence 1 has 3 queries in a context of 2"):
        build_batch([1, 3], [1, 2], [[0], [1]], block_size=4)


def test_new_tokens_need_blocks_and_lengths_are_whole():
    assert build_batch([1], [9], [[-1, 0, 4]], block_size=4).slots.tolist() == [16]  # slid out of a window
    with pytest.raises(ValueError, match=r"sequence 1 has no block for a new token in \[0, -1\]"):
        build_batch([1, 1], [5, 6], [[2, 3], [0, -1]], block_size=4)
    with pytest.raises(ValueError, match="query_lengths must be whole numbers, not float64"):
        build_batch([1.5], [3], [[0]], block_size=4)


def test_too_few_blocks_are_refused():
    with pytest.raises(ValueError, match="sequence 0 of 9 tokens needs 3 blocks of 4, not 2"):
        build_batch([1], [9], [[0, 1]], block_size=4)


def batch_of(**changes):
    fields: dict[str, Any] = {
        "query_starts": torch.tensor([0, 1], dtype=torch.int32),
        "lengths": torch.tensor([3], dtype=torch.int32),
        "block_table": torch.tensor([[0]], dtype=torch.int32),
        "slots": torch.tensor([2]),
        "max_query": 1,
        "max_length": 3,
        "num_decodes": 1,
    }
    return AttentionBatch(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": torch.tensor([3])}, "lengths must be a 1-dimensional torch.int32"),
        ({"block_table": torch.tensor([0], dtype=torch.int32)}, "block_table must be a 2-dimensional"),
        ({"slots": torch.tensor([2], dtype=torch.int32)}, "slots must be a 1-dimensional torch.int64"),
        ({"query_starts": torch.tensor([0], dtype=torch.int32)}, "1 lengths need 2 query_starts"),
        ({"num_decodes": 2}, "num_decodes is 2, of 1 sequences"),
        ({"slots": torch.empty(1, dtype=torch.int64, device="meta")}, "slots is on meta, lengths on cpu"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        batch_of(**changes)
