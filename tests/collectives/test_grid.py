import pytest

from collectives import Coordinates, Grid


def test_tp_varies_fastest_then_pp_then_dp():
    grid = Grid(dp=2, pp=3, tp=4)
    assert grid.size == 24
    assert grid.coordinates(0) == Coordinates(dp=0, pp=0, tp=0)
    assert grid.coordinates(1) == Coordinates(dp=0, pp=0, tp=1)
    assert grid.coordinates(4) == Coordinates(dp=0, pp=1, tp=0)
    assert grid.coordinates(12) == Coordinates(dp=1, pp=0, tp=0)
    assert grid.coordinates(23) == Coordinates(dp=1, pp=2, tp=3)
    assert grid.rank(dp=1, pp=2, tp=3) == 23
    assert grid.rank(pp=1) == 4


@pytest.mark.parametrize("grid", [Grid(), Grid(tp=8), Grid(dp=3, pp=2, tp=1), Grid(dp=2, pp=2, tp=2)])
def test_rank_and_coordinates_are_inverse(grid):
    assert [grid.rank(*grid.coordinates(rank)) for rank in range(grid.size)] == list(range(grid.size))


def test_groups_along_each_axis():
    grid = Grid(dp=2, pp=2, tp=2)
    assert grid.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.groups("pp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_experts_are_spread_over_the_ranks_of_one_pipeline_stage():
    grid = Grid(dp=2, pp=2, tp=2)
    assert grid.ep == 4
    assert grid.groups("ep") == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_rank_is_in_the_group_at_its_coordinate():
    grid = Grid(dp=2, pp=3, tp=4)
    assert grid.group("tp", 17) == [16, 17, 18, 19]
    assert grid.group("pp", 17) == [13, 17, 21]
    assert grid.group("dp", 17) == [5, 17]
    assert grid.group("ep", 17) == [4, 5, 6, 7, 16, 17, 18, 19]
    assert grid.coordinates(17) == Coordinates(dp=1, pp=1, tp=1)


def test_a_single_rank_is_alone_in_every_group():
    assert [Grid().groups(axis) for axis in ("dp", "pp", "tp", "ep")] == [[[0]]] * 4


def test_errors_name_what_is_out_of_range():
    with pytest.raises(ValueError, match="at least 1 rank along each axis, got pp=0"):
        Grid(dp=2, pp=0)
    grid = Grid(dp=2, tp=2)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 4\).*got 4"):
        grid.coordinates(4)
    with pytest.raises(ValueError, match=r"tp must be in \[0, 2\).*got -1"):
        grid.rank(tp=-1)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 4\).*got 9"):
        grid.group("tp", 9)
    with pytest.raises(ValueError, match="axis must be dp, pp, tp or ep, got 'sp'"):
        grid.groups("sp")  # ty: ignore[invalid-argument-type]
