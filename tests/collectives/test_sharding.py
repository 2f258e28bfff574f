import pytest

from collectives import Shard, padded_shard, shard


def cuts(length, ranks, units=None):
    return [tuple(shard(length, ranks, rank, units)) for rank in range(ranks)]


def test_features_are_cut_as_evenly_as_they_come():
    assert cuts(12, 4) == [(0, 3), (3, 6), (6, 9), (9, 12)]
    assert cuts(11, 4) == [(0, 3), (3, 6), (6, 9), (9, 11)]
    assert cuts(2, 4) == [(0, 1), (1, 2), (2, 2), (2, 2)]


def test_units_are_not_cut():
    assert cuts(12, 2, units=4) == [(0, 6), (6, 12)]


def test_fewer_units_than_ranks_are_replicated_to_neighbours():
    assert cuts(6, 4, units=2) == [(0, 3), (0, 3), (3, 6), (3, 6)]
    assert cuts(5, 2, units=1) == [(0, 5), (0, 5)]


def test_unit_counts_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"3 units \(heads\) cannot be given to 2 ranks evenly"):
        shard(12, 2, 0, units=3)
    with pytest.raises(ValueError, match=r"3 units \(heads\) cannot be given to 4 ranks evenly"):
        shard(12, 4, 0, units=3)
    with pytest.raises(ValueError, match="10 features cannot be made of 4 units"):
        shard(10, 2, 0, units=4)
    with pytest.raises(ValueError, match="10 features cannot be made of 0 units"):
        shard(10, 2, 0, units=0)


def test_padding_is_on_the_last_ranks_and_in_no_shard():
    assert [padded_shard(321, 4, rank) for rank in range(4)] == [
        Shard(0, 81),
        Shard(81, 162),
        Shard(162, 243),
        Shard(243, 321),
    ]
    assert [padded_shard(5, 4, rank).size for rank in range(4)] == [2, 2, 1, 0]
