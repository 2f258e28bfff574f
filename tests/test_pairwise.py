from itertools import combinations, product
from math import prod

import pytest

from pairwise import all_pairs, parametrize_pairs

SIZES = [[4], [2, 3], [9, 2], [3, 3, 3, 3], [2] * 10, [5, 1, 4], [8, 5, 5, 3, 2, 2, 3, 3, 2, 3]]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_pair_is_there(sizes):
    rows = all_pairs(sizes)
    assert all(0 <= index < size for row in rows for index, size in zip(row, sizes, strict=True))
    for one, other in combinations(range(len(sizes)), 2):
        met = {(row[one], row[other]) for row in rows}
        assert met == set(product(range(sizes[one]), range(sizes[other])))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_are_few_and_differ(sizes):
    rows = all_pairs(sizes)
    assert len(set(rows)) == len(rows)
    # The pairs of the two largest columns alone take as many rows as their product.
    assert len(rows) <= 2.5 * prod(sorted(sizes)[-2:])


def test_every_value_of_one_column_is_there():
    assert all_pairs([3]) == [(0,), (1,), (2,)]
    assert all_pairs([]) == []


def test_rows_become_parameters_with_readable_names():
    mark = parametrize_pairs(size=[1, 2], kind={"plain": None, "all": {"window": 3}})
    names, rows = mark.args
    assert names == ("size", "kind")
    assert {row.id: row.values for row in rows} == {
        "1-plain": (1, None),
        "1-all": (1, {"window": 3}),
        "2-plain": (2, None),
        "2-all": (2, {"window": 3}),
    }
