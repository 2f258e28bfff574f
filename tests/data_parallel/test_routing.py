"""The routing policy as a function of columns."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginecore.data_parallel.routing import RankLoads, choose, scores


def loads(*ranks: dict[str, int]) -> RankLoads:
    """Idle ranks with an empty cache of 100 blocks, but for what is given."""

    def column(name: str, default: int) -> np.ndarray:
        return np.array([rank.get(name, default) for rank in ranks])

    return RankLoads(
        up=column("up", 1).astype(bool),
        waiting=column("waiting", 0),
        running=column("running", 0),
        sent=column("sent", 0),
        free_blocks=column("free_blocks", 100),
        num_blocks=column("num_blocks", 100),
    )


def test_a_score_is_four_for_each_that_waits_and_one_for_each_that_runs():
    some = loads({"waiting": 3, "running": 5}, {"sent": 2, "running": 1}, {})
    assert scores(some).tolist() == [17, 9, 0]


def test_the_cache_counts_little_until_it_is_nearly_full():
    found = scores(loads(*({"free_blocks": free} for free in (100, 50, 20, 10, 5, 0))))
    assert found.tolist() == [0, 0, 0, 34, 193, 1000]


def test_a_cache_of_unknown_size_is_taken_for_an_empty_one():
    assert scores(loads({"num_blocks": 0, "free_blocks": 0})).tolist() == [0]


def test_a_full_rank_gets_nothing_while_another_has_room():
    assert choose(loads({"free_blocks": 0}, {"waiting": 100, "running": 200}), 0) == 1


def test_ties_are_taken_in_turn():
    equal = loads({}, {"running": 1}, {}, {})
    assert [choose(equal, turn) for turn in range(6)] == [0, 2, 3, 0, 2, 3]


def test_ranks_that_are_not_up_get_nothing():
    assert choose(loads({"up": 0}, {"waiting": 50}), 0) == 1
    assert choose(loads({"up": 0}, {"up": 0}), 0, np.array([5, 5])) is None
    assert choose(loads(), 0) is None


def test_the_longest_cached_prefix_is_preferred():
    some = loads({"running": 1}, {"running": 6}, {"running": 2})
    assert choose(some, 0, np.array([0, 64, 32])) == 1


def test_of_equal_prefixes_the_least_loaded_is_taken():
    some = loads({"running": 4}, {"running": 3}, {"running": 3})
    assert [choose(some, turn, np.array([64, 64, 64])) for turn in range(3)] == [1, 2, 1]


def test_a_busy_rank_is_passed_over_however_long_its_prefix():
    some = loads({"running": 4}, {"waiting": 4, "running": 1}, {"running": 10})
    assert choose(some, 0, np.array([0, 4096, 32])) == 2


ranks = st.builds(
    dict,
    up=st.integers(0, 1),
    waiting=st.integers(0, 1000),
    running=st.integers(0, 1000),
    sent=st.integers(0, 100),
    free_blocks=st.integers(0, 100),
)


@given(st.lists(ranks, max_size=12), st.integers(0, 1000))
def test_the_chosen_rank_is_up_and_no_other_that_is_up_scores_less(some, turn):
    columns = loads(*some)
    chosen = choose(columns, turn)
    up = [index for index, rank in enumerate(some) if rank["up"]]
    if not up:
        assert chosen is None
        return
    assert chosen in up
    assert scores(columns)[chosen] == min(scores(columns)[up])


@given(st.lists(st.tuples(ranks, st.integers(0, 5000)), min_size=1, max_size=12), st.integers(0, 1000))
def test_no_rank_with_more_cached_scores_as_little(some, turn):
    columns = loads(*(rank for rank, _ in some))
    cached = np.array([tokens for _, tokens in some])
    chosen = choose(columns, turn, cached)
    if chosen is None:
        return
    score = scores(columns)
    better = columns.up & (cached >= cached[chosen]) & (score < score[chosen])
    assert not better.any()


@pytest.mark.parametrize("front_ends", [1, 4])
def test_a_burst_is_spread_evenly_although_no_report_comes(front_ends):
    """Each front-end knows of its own requests only."""
    views = [loads(*({} for _ in range(4))) for _ in range(front_ends)]
    got = np.zeros(4, int)
    for number in range(64):
        view = views[number % front_ends]
        chosen = choose(view, number % front_ends + number // front_ends)
        view.sent[chosen] += 1
        got[chosen] += 1
    assert got.tolist() == [16, 16, 16, 16]
