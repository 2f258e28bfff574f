import pytest

from collectives import Shard, attention_shards, padded_shard, shard


def cuts(length, ranks):
    return [tuple(shard(length, ranks, rank)) for rank in range(ranks)]


def test_features_are_cut_as_evenly_as_they_come():
    assert cuts(12, 4) == [(0, 3), (3, 6), (6, 9), (9, 12)]
    assert cuts(11, 4) == [(0, 3), (3, 6), (6, 9), (9, 11)]
    assert cuts(2, 4) == [(0, 1), (1, 2), (2, 2), (2, 2)]


def test_padding_is_on_the_last_ranks_and_in_no_shard():
    assert [padded_shard(321, 4, rank) for rank in range(4)] == [
        Shard(0, 81),
        Shard(81, 162),
        Shard(162, 243),
        Shard(243, 321),
    ]
    assert [padded_shard(5, 4, rank).size for rank in range(4)] == [2, 2, 1, 0]


def heads(query_heads, kv_heads, ranks):
    return [(*tuple(s.query), *tuple(s.kv)) for s in attention_shards(query_heads, kv_heads, ranks)]


def test_groups_of_heads_are_cut_whole_while_there_are_as_many_as_ranks():
    assert heads(9, 3, 2) == [(0, 6, 0, 2), (6, 9, 2, 3)]
    assert heads(8, 8, 3) == [(0, 3, 0, 3), (3, 6, 3, 6), (6, 8, 6, 8)]
    assert heads(32, 8, 4) == [(0, 8, 0, 2), (8, 16, 2, 4), (16, 24, 4, 6), (24, 32, 6, 8)]


def test_ranks_share_a_key_head_and_cut_its_query_heads_when_there_are_fewer():
    assert heads(6, 2, 4) == [(0, 2, 0, 1), (2, 3, 0, 1), (3, 5, 1, 2), (5, 6, 1, 2)]
    assert heads(9, 3, 4) == [(0, 2, 0, 1), (2, 3, 0, 1), (3, 6, 1, 2), (6, 9, 2, 3)]
    assert heads(7, 1, 3) == [(0, 3, 0, 1), (3, 5, 0, 1), (5, 7, 0, 1)]


def test_heads_that_come_evenly():
    assert heads(8, 4, 2) == [(0, 4, 0, 2), (4, 8, 2, 4)]
    assert heads(8, 2, 4) == [(0, 2, 0, 1), (2, 4, 0, 1), (4, 6, 1, 2), (6, 8, 1, 2)]
    assert heads(4, 1, 4) == [(0, 1, 0, 1), (1, 2, 0, 1), (2, 3, 0, 1), (3, 4, 0, 1)]
    assert heads(6, 2, 1) == [(0, 6, 0, 2)]


@pytest.mark.parametrize("ranks", range(1, 13))
@pytest.mark.parametrize("kv_heads", range(1, 9))
@pytest.mark.parametrize("group", [1, 2, 3, 7])
def test_every_query_head_is_on_one_rank_beside_the_key_head_it_attends_to(ranks, kv_heads, group):
    if ranks > kv_heads * group:
        with pytest.raises(ValueError, match="cannot be cut for"):
            attention_shards(kv_heads * group, kv_heads, ranks)
        return
    met = []
    for query, kv in attention_shards(kv_heads * group, kv_heads, ranks):
        assert query.size > 0
        assert query.size % kv.size == 0
        met += [(head, kv.start + i // (query.size // kv.size)) for i, head in enumerate(range(*query))]
    assert met == [(head, head // group) for head in range(kv_heads * group)]


def test_heads_that_cannot_be_cut_are_named():
    with pytest.raises(ValueError, match="9 query heads cannot share 2 key and value heads"):
        attention_shards(9, 2, 2)
    with pytest.raises(ValueError, match="4 query heads cannot be cut for 5 ranks: a rank would have none"):
        attention_shards(4, 2, 5)
