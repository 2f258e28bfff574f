"""Where experts are, and that tokens sent to them come back as if all were in one place."""

import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from collectives import (
    Communicator,
    ExpertDispatcher,
    ExpertPlacement,
    LocalCommunicator,
    load_placements,
    save_placements,
)

pytestmark = pytest.mark.xdist_group("ranks")

EXPERTS, HIDDEN, CHOICES = 8, 12, 3
TOKENS = {1: [7], 2: [6, 0], 3: [0, 5, 2], 4: [3, 0, 9, 1]}  # of each rank
PLACEMENTS = {
    1: [((5, 0, 1, 2, 3, 4, 7, 6),)],
    2: [((0, 1, 2, 3), (4, 5, 6, 7)), ((7, 0, 1, 2, 3), (1, 4, 5, 6, 7, 0)), ((), tuple(range(8)))],
    3: [((0, 1, 2), (3, 4, 5), (6, 7)), ((2, 0, 1, 4), (4, 3, 5, 2), (2, 7, 6, 4))],
    4: [((0, 1), (2, 3), (4, 5), (6, 7)), ((3, 0, 1), (2, 3), (4, 3, 5), (6, 7, 3))],
}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def brought(rank: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens, choices and weights of a rank; expert 6 is chosen by nobody, and expert 3 by most."""
    tokens = TOKENS[size][rank]
    odds = torch.tensor([1.0, 1, 1, 9, 1, 1, 0, 1])
    torch.manual_seed(rank + 10)
    chosen = [torch.multinomial(odds, CHOICES) for _ in range(tokens)]
    experts = torch.stack(chosen) if chosen else torch.empty(0, CHOICES, dtype=torch.int64)
    return (
        draw(tokens, HIDDEN, seed=rank).to(dtype),
        experts,
        draw(tokens, CHOICES, seed=rank + 20).softmax(-1),
    )


def expert(number: int, rows: Tensor) -> Tensor:
    """What an expert makes of [n, hidden]."""
    return torch.tanh(rows @ (draw(HIDDEN, HIDDEN, seed=100 + number) / 3).to(rows.dtype))


def dense(x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Token by token, choice by choice, in float64."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for token, choice in itertools.product(range(x.shape[0]), range(experts.shape[1])):
        result = expert(int(experts[token, choice]), x[token : token + 1].double())
        y[token] += weights[token, choice].double() * result[0]
    return y


def local_experts(held: tuple[int, ...]):
    """A grouped product by a loop, which also sees that the groups are what they should be."""

    def compute(rows: Tensor, starts: Tensor) -> Tensor:
        assert starts.dtype == torch.int32 and starts.shape == (len(held) + 1,)
        assert starts[0] == 0 and starts[-1] == rows.shape[0]
        pieces = [expert(number, rows[a:b]) for number, a, b in zip(held, starts, starts[1:])]
        return torch.cat([rows[:0], *pieces])

    return compute


def test_on_every_rank(check, ranks):
    ranks.assert_passed(check)


def ranks_tokens_get_the_sum_of_their_experts(comm: Communicator):
    for placement in [ExpertPlacement(EXPERTS, held) for held in PLACEMENTS[comm.size]]:
        dispatcher = ExpertDispatcher(comm, placement)
        compute = local_experts(placement.local(comm.rank))
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
            x, experts, weights = brought(comm.rank, comm.size, dtype)
            y = dispatcher.forward(x, experts, weights, compute)
            assert y.dtype == dtype
            torch.testing.assert_close(y.double(), dense(x, experts, weights), rtol=tolerance, atol=tolerance)


def ranks_nobody_has_a_token(comm: Communicator):
    dispatcher = ExpertDispatcher(comm, ExpertPlacement.even(EXPERTS, comm.size))
    x, experts = torch.empty(0, HIDDEN), torch.empty(0, CHOICES, dtype=torch.int64)
    y = dispatcher.forward(x, experts, experts.float(), lambda rows, starts: rows)
    assert y.shape == (0, HIDDEN)


def ranks_the_sum_has_the_same_bits_as_on_one_rank(comm: Communicator):
    # Experts that only scale give each row the same bits whatever rows are beside it.
    scale = torch.arange(1.0, EXPERTS + 1).sqrt()

    def scaling(held):
        def compute(rows, starts):
            number = torch.tensor(held, dtype=torch.int64).repeat_interleave(starts.diff())
            return rows * scale[number, None]

        return compute

    x, experts, weights = brought(comm.rank, comm.size, torch.float32)
    alone = ExpertDispatcher(LocalCommunicator(), ExpertPlacement.even(EXPERTS, 1))
    expected = alone.forward(x, experts, weights, scaling(range(EXPERTS)))
    for held in PLACEMENTS[comm.size]:
        dispatcher = ExpertDispatcher(comm, ExpertPlacement(EXPERTS, held))
        assert torch.equal(dispatcher.forward(x, experts, weights, scaling(held[comm.rank])), expected)


def ranks_each_counts_the_tokens_it_sends(comm: Communicator):
    dispatcher = ExpertDispatcher(comm, ExpertPlacement.even(EXPERTS, comm.size))
    x, experts, weights = brought(comm.rank, comm.size, torch.float32)
    counted = [experts.flatten().tolist().count(number) for number in range(EXPERTS)]
    for times in (1, 2):
        dispatcher.forward(x, experts, weights, lambda rows, starts: rows)
        assert dispatcher.loads.tolist() == [times * count for count in counted]
    dispatcher.reset_loads()
    assert dispatcher.loads.tolist() == [0] * EXPERTS


def ranks_copies_of_an_expert_share_its_tokens(comm: Communicator):
    everywhere = ExpertPlacement(1, ((0,),) * comm.size)
    dispatcher, seen = ExpertDispatcher(comm, everywhere), []

    def compute(rows, starts):
        seen.append(rows.shape[0])
        return rows

    tokens = 3 * comm.size
    experts = torch.zeros(tokens, 1, dtype=torch.int64)
    dispatcher.forward(torch.ones(tokens, 2), experts, torch.ones(tokens, 1), compute)
    # A single token of each rank goes to a copy of its own too.
    dispatcher.forward(torch.ones(1, 2), experts[:1], torch.ones(1, 1), compute)
    assert seen == [tokens, 1]


def test_alone_nothing_is_read_back_or_sent():
    placement = ExpertPlacement(EXPERTS, PLACEMENTS[1][0])
    x, experts, weights = brought(0, 1, torch.float32)

    class Silent(LocalCommunicator):
        def all_to_all(self, *arguments):
            raise AssertionError("nobody to exchange with")

    y = ExpertDispatcher(Silent(), placement).forward(x, experts, weights, local_experts(placement.local(0)))
    torch.testing.assert_close(y.double(), dense(x, experts, weights), rtol=1e-5, atol=1e-5)

    # A meta tensor has no values: reading one would raise.
    on_meta = ExpertDispatcher(Silent(), placement, device="meta")
    y = on_meta.forward(
        x.to("meta"), experts.to("meta"), weights.to("meta"), lambda rows, starts: torch.empty_like(rows)
    )
    assert y.shape == x.shape


def test_shapes_that_do_not_fit_are_refused():
    dispatcher = ExpertDispatcher(LocalCommunicator(), ExpertPlacement.even(2, 1))
    experts = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"experts \[3, 2\] and weights \[3, 1\] must both be \[tokens, k\]"):
        dispatcher.forward(torch.ones(3, 4), experts, torch.ones(3, 1), lambda rows, starts: rows)
    with pytest.raises(ValueError, match=r"for x \[4, 4\]"):
        dispatcher.forward(torch.ones(4, 4), experts, torch.ones(3, 2), lambda rows, starts: rows)
    with pytest.raises(ValueError, match=r"compute must return \[6, 4\] for as many rows, got \[5, 4\]"):
        dispatcher.forward(torch.ones(3, 4), experts, torch.ones(3, 2), lambda rows, starts: rows[:5])
    with pytest.raises(ValueError, match="the placement is for 2 ranks, and the group has 1"):
        ExpertDispatcher(LocalCommunicator(), ExpertPlacement.even(2, 2))


def test_even_placement():
    assert ExpertPlacement.even(8, 2).ranks == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert ExpertPlacement.even(7, 3).ranks == ((0, 1, 2), (3, 4), (5, 6))
    assert ExpertPlacement.even(2, 4).ranks == ((0,), (1,), (), ())
    assert ExpertPlacement.even(7, 3).local(1) == (3, 4)


def test_heavy_experts_get_copies_and_ranks_share_the_load():
    # 60 on two copies is 30 each; 30 + 10, 30 + 10, 20 + 12 is the best there is.
    placement = ExpertPlacement.balanced([10, 60, 10, 20, 12], 3, redundant=1)
    assert sorted(placement.ranks) == [(0, 1), (1, 2), (3, 4)]
    assert ExpertPlacement.balanced([1, 1, 8, 8], 2).ranks in (((0, 2), (1, 3)), ((1, 2), (0, 3)))


def test_a_copy_for_which_only_a_rank_with_a_copy_has_room_takes_the_place_of_another():
    # Heaviest first puts 3 on one rank, 0 and 1 on the other, and both copies of 2 find room on the first.
    assert sorted(ExpertPlacement.balanced([3, 3, 5, 5], 2, redundant=1).ranks) == [(0, 1, 2), (2, 3)]


def test_balanced_refuses_what_cannot_be():
    with pytest.raises(ValueError, match="4 experts on 2 ranks can have 0 to 4 redundant copies, got 5"):
        ExpertPlacement.balanced([1] * 4, 2, redundant=5)
    with pytest.raises(ValueError, match="got -1"):
        ExpertPlacement.balanced([1] * 4, 2, redundant=-1)
    for load in (-3, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"loads must be finite and not negative, got {load}"):
            ExpertPlacement.balanced([1, load], 2)


@st.composite
def demands(draw):
    loads = draw(st.lists(st.integers(0, 1000) | st.floats(0, 10), min_size=1, max_size=20))
    ranks = draw(st.integers(1, 8))
    return loads, ranks, draw(st.integers(0, min(len(loads) * (ranks - 1), 12)))


def rank_loads(placement, loads):
    copies = [sum(held.count(e) for held in placement.ranks) for e in range(len(loads))]
    return copies, [sum(loads[e] / copies[e] for e in held) for held in placement.ranks]


@given(demands())
@settings(max_examples=300, deadline=None)
def test_every_balanced_placement_is_sound(demand):
    loads, ranks, redundant = demand
    placement = ExpertPlacement.balanced(loads, ranks, redundant)
    sizes = [len(held) for held in placement.ranks]
    assert len(sizes) == ranks and sum(sizes) == len(loads) + redundant
    assert max(sizes) - min(sizes) <= 1
    assert all(len(set(held)) == len(held) for held in placement.ranks)
    copies, per_rank = rank_loads(placement, loads)
    assert min(copies) >= 1
    # No expert with spare ranks to go to is busier, copy for copy, than one with a copy more would be.
    for one, other in itertools.permutations(range(len(loads)), 2):
        if copies[one] < ranks and copies[other] > 1:
            assert loads[one] / copies[one] <= loads[other] / (copies[other] - 1) + 1e-9
    heaviest = max(load / count for load, count in zip(loads, copies))
    assert max(per_rank) <= sum(loads) / ranks + heaviest + 1e-9
    assert ExpertPlacement.balanced(loads, ranks, redundant) == placement


@given(st.lists(st.integers(0, 50), min_size=6, max_size=6))
@settings(max_examples=60, deadline=None)
def test_the_busiest_rank_is_near_the_best_there_is(loads):
    _, per_rank = rank_loads(ExpertPlacement.balanced(loads, 2), loads)
    best = min(
        max(sum(half), sum(loads) - sum(half)) for half in itertools.combinations(loads, 3)
    )  # of all ways to give each rank three
    assert max(per_rank) <= 4 / 3 * best + 1e-9


def test_a_placement_is_read_as_it_was_written(tmp_path):
    path, placement = tmp_path / "placement.json", ExpertPlacement(3, ((2, 0), (1, 2)))
    save_placements(path, [placement])
    assert json.loads(path.read_text()) == {"num_experts": 3, "ranks": [[2, 0], [1, 2]]}
    assert load_placements(path) == (placement,)


def test_a_placement_for_each_layer_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "placement.json"
    placements = (ExpertPlacement(3, ((2, 0), (1, 2))), ExpertPlacement(3, ((0, 1, 2), ())))
    save_placements(path, placements)
    assert json.loads(path.read_text()) == {
        "num_experts": 3,
        "layers": [[[2, 0], [1, 2]], [[0, 1, 2], []]],
    }
    assert load_placements(path) == placements


def test_layers_of_different_numbers_are_refused(tmp_path):
    path = tmp_path / "placement.json"
    placements = [ExpertPlacement.even(4, 2), ExpertPlacement.even(4, 1)]
    with pytest.raises(
        ValueError, match=r"the same numbers of experts and ranks, got \[\(4, 1\), \(4, 2\)\]"
    ):
        save_placements(path, placements)
    assert not path.exists()


@pytest.mark.parametrize(
    "content,error",
    [
        ('{"num_experts": 3, "ranks": [[0], [1]]}', r"no rank of 2 holds 1 of the experts, first 2"),
        ('{"num_experts": 2, "ranks": [[0, 1], [2, -1]]}', r"rank 1 holds \[2, -1\], but experts are 0 to 1"),
        ('{"num_experts": 2, "ranks": [[0, 1, 0]]}', r"rank 0 holds an expert twice: \[0, 1, 0\]"),
        ('{"ranks": [[0]]}', "num_experts"),
        ('{"num_experts": 1, "ranks": [0]}', "0 is no list"),
        ('{"num_experts": 3, "ranks": ["02", "12"]}', "'02' is no list"),
        ('{"num_experts": 2, "ranks": [[0.9], [1]]}', "0.9 is no whole number"),
        ('{"num_experts": true, "ranks": [[0]]}', "True is no whole number"),
        ('{"num_experts": Infinity, "ranks": [[0]]}', "inf is no whole number"),
        ('{"num_experts": 1000000000000, "ranks": [[0]]}', "999999999999 of the experts, first 1"),
        ("[" * 100000, "RecursionError"),
        ('{"num_experts": 2, "layers": [[[0], [1]], [[0, 1]]]}', "same numbers of experts and ranks"),
        ('{"num_experts": 2, "layers": []}', "same numbers of experts and ranks"),
        ('[["0"]]', "indices"),
        ("{", "JSONDecodeError"),
    ],
)
def test_a_file_that_is_no_placement_is_named_with_the_reason(tmp_path, content, error):
    path = tmp_path / "placement.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"{path} is no expert placement .*{error}"):
        load_placements(path)
    with pytest.raises(FileNotFoundError):
        load_placements(tmp_path / "missing.json")
