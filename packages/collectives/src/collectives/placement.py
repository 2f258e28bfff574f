"""Expert placement: the experts that each rank holds."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collectives.sharding import shard


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """The ids, from 0, of the experts that each rank holds, in the order of its weights.

    An expert may have copies on several ranks, but not two on one. Ranks may hold different numbers.

    Raises ValueError when an id is out of range, an expert is nowhere, or is twice on a rank.
    """

    num_experts: int
    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for rank, held in enumerate(self.ranks):
            outside = [expert for expert in held if not 0 <= expert < self.num_experts]
            if outside:
                raise ValueError(f"rank {rank} holds {outside}, but experts are 0 to {self.num_experts - 1}")
            if len(set(held)) != len(held):
                raise ValueError(f"rank {rank} holds an expert twice: {list(held)}")
        housed = {expert for held in self.ranks for expert in held}
        if len(housed) < self.num_experts:
            homeless = next(expert for expert in range(self.num_experts) if expert not in housed)
            missing = self.num_experts - len(housed)
            raise ValueError(f"no rank of {len(self.ranks)} holds {missing} of the experts, first {homeless}")

    @classmethod
    def even(cls, num_experts: int, ranks: int) -> "ExpertPlacement":
        """Place one copy of each, in order, as evenly as they come: the first ranks may hold one more."""
        cuts = [shard(num_experts, ranks, rank) for rank in range(ranks)]
        return cls(num_experts, tuple(tuple(range(cut.start, cut.stop)) for cut in cuts))

    @classmethod
    def balanced(cls, loads: Sequence[float], ranks: int, redundant: int = 0) -> "ExpertPlacement":
        """Place experts of measured `loads`, with `redundant` further copies, to balance the ranks' loads.

        Each further copy goes to the expert with most load per copy. Then the copies are placed greedily,
        heaviest first, on the least loaded rank with room, and exchanged as long as that lowers the load of
        the busiest rank. Every rank holds equally many, or one more than others when they do not divide.
        The algorithm follows DeepSeek-V3's expert load balancing (arXiv 2412.19437, section 3.4), without its
        groups of experts and nodes.

        Raises ValueError when a load is negative, NaN or infinite, or not every copy can have a rank of its
        own.
        """
        wrong = [load for load in loads if not 0 <= load < float("inf")]
        if wrong:
            raise ValueError(f"loads must be finite and not negative, got {wrong[0]}")
        copies = _copies(loads, ranks, redundant)
        shares = [load / count for load, count in zip(loads, copies)]
        room = [shard(sum(copies), ranks, rank).size for rank in range(ranks)]
        held: list[list[int]] = [[] for _ in range(ranks)]
        for expert in sorted(range(len(loads)), key=lambda expert: (-shares[expert], expert)):
            for _ in range(copies[expert]):
                _place(expert, held, room, shares)
        _level(held, shares)
        return cls(len(loads), tuple(tuple(sorted(experts)) for experts in held))

    def local(self, rank: int) -> tuple[int, ...]:
        """Return the experts of one rank, in the order of its weights."""
        return self.ranks[rank]


def load_placements(path: str | Path) -> tuple[ExpertPlacement, ...]:
    """Read the JSON that `save_placements` writes: one placement for all layers, or one for each.

    Raises FileNotFoundError, and ValueError, which names the file, when it is not of that form.
    """
    try:
        content = json.loads(Path(path).read_text())
        layers = content["layers"] if "layers" in content else [content["ranks"]]
        experts = _whole(content["num_experts"])
        found = tuple(
            ExpertPlacement(experts, tuple(tuple(map(_whole, _list(held))) for held in _list(ranks)))
            for ranks in _list(layers)
        )
        _check_alike(found)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        form = '{"num_experts": N, "ranks": [[experts of rank 0], …]}, or "layers": [ranks of each layer, …]'
        raise ValueError(f"{path} is no expert placement {form}: {error!r}") from error
    return found


def _whole(number: object) -> int:
    if type(number) is not int:
        raise TypeError(f"{number!r} is no whole number")
    return number


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return value


def save_placements(path: str | Path, placements: Sequence[ExpertPlacement]) -> None:
    """Write one placement as "ranks", for all layers, or several as "layers", one for each in order.

    {"num_experts": N, "ranks": [[experts of rank 0], [experts of rank 1], …]}
    {"num_experts": N, "layers": [[[experts of rank 0], …], …]}

    Raises ValueError when they differ in the number of experts or ranks, or there is none.
    """
    _check_alike(placements)
    ranks = [placement.ranks for placement in placements]
    where = {"ranks": ranks[0]} if len(ranks) == 1 else {"layers": ranks}
    Path(path).write_text(json.dumps({"num_experts": placements[0].num_experts, **where}) + "\n")


def _check_alike(placements: Sequence[ExpertPlacement]) -> None:
    sizes = {(placement.num_experts, len(placement.ranks)) for placement in placements}
    if len(sizes) != 1:
        raise ValueError(f"all layers must have the same numbers of experts and ranks, got {sorted(sizes)}")


def _copies(loads: Sequence[float], ranks: int, redundant: int) -> list[int]:
    """Return the number of copies of each expert."""
    experts = len(loads)
    if redundant < 0 or experts + redundant > experts * ranks:
        raise ValueError(
            f"{experts} experts on {ranks} ranks can have 0 to {experts * (ranks - 1)} redundant copies, "
            f"got {redundant}"
        )
    copies = [1] * experts
    for _ in range(redundant):
        candidates = [expert for expert in range(experts) if copies[expert] < ranks]
        copies[max(candidates, key=lambda expert: (loads[expert] / copies[expert], -copies[expert]))] += 1
    return copies


def _place(expert: int, held: list[list[int]], room: Sequence[int], shares: Sequence[float]) -> None:
    """Put a copy of `expert` on the least loaded rank that has room and no copy yet."""

    def load(rank: int) -> float:
        return sum(shares[other] for other in held[rank])

    spare = [rank for rank in range(len(held)) if len(held[rank]) < room[rank]]
    free = [rank for rank in spare if expert not in held[rank]]
    if free:
        held[min(free, key=load)].append(expert)
        return
    # Only ranks that have a copy have room. A rank without one is full of experts, of which at least one is
    # not on the rank with room, as that holds no more and one of them is `expert`: that one moves over.
    target = min(spare, key=load)
    moves = [
        (shares[other], rank, other)
        for rank in range(len(held))
        if expert not in held[rank]
        for other in held[rank]
        if other not in held[target]
    ]
    _, rank, other = min(moves)
    held[rank][held[rank].index(other)] = expert
    held[target].append(other)


def _level(held: list[list[int]], shares: Sequence[float]) -> None:
    """Exchange experts of the busiest rank for lighter ones of another, while that makes it less busy."""
    while True:
        loads = [sum(shares[expert] for expert in experts) for experts in held]
        busiest = max(range(len(held)), key=loads.__getitem__)
        exchanges = [
            (max(loads[busiest] - less, loads[rank] + less), rank, mine, theirs)
            for rank in range(len(held))
            for mine in set(held[busiest]) - set(held[rank])
            for theirs in set(held[rank]) - set(held[busiest])
            if (less := shares[mine] - shares[theirs]) > 0
        ]
        after, rank, mine, theirs = min(exchanges, default=(loads[busiest], 0, 0, 0))
        if after >= loads[busiest] * (1 - 1e-9):
            return
        held[busiest][held[busiest].index(mine)] = theirs
        held[rank][held[rank].index(theirs)] = mine
