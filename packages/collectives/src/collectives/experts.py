"""Experts spread over ranks: where each is, and how tokens get there and back."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from collectives.communicator import Communicator
from collectives.layers import Device
from collectives.sharding import shard

Compute = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Which experts each rank holds, by id from 0, in the order in which it holds them.

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
        homeless = sorted(set(range(self.num_experts)) - {e for held in self.ranks for e in held})
        if homeless:
            raise ValueError(f"no rank of {len(self.ranks)} holds the experts {homeless}")

    @classmethod
    def even(cls, num_experts: int, ranks: int) -> "ExpertPlacement":
        """One copy of each, in order, cut as evenly as they come: the first ranks may hold one more."""
        cuts = [shard(num_experts, ranks, rank) for rank in range(ranks)]
        return cls(num_experts, tuple(tuple(range(cut.start, cut.stop)) for cut in cuts))

    @classmethod
    def balanced(cls, loads: Sequence[float], ranks: int, redundant: int = 0) -> "ExpertPlacement":
        """Place experts of measured `loads`, and `redundant` copies more, so that no rank has much to do.

        A copy at a time goes to the expert with most load on each of its copies; then the copies are put on
        ranks, heaviest first, each where the load is least and there is room, and at last exchanged for as
        long as that helps the busiest rank. Every rank holds equally many, or one more than others when they
        do not divide. This is the idea of DeepSeek-V3's expert load
        balancing (arXiv 2412.19437, section 3.4), without its groups of experts and nodes.

        Raises ValueError when a load is negative, or not every copy can have a rank of its own.
        """
        if min(loads, default=0.0) < 0:
            raise ValueError(f"loads must not be negative, got {min(loads)}")
        copies = _copies(loads, ranks, redundant)
        shares = [load / count for load, count in zip(loads, copies)]
        room = [shard(sum(copies), ranks, rank).size for rank in range(ranks)]
        held: list[list[int]] = [[] for _ in range(ranks)]
        for expert in sorted(range(len(loads)), key=lambda expert: (-shares[expert], expert)):
            for _ in range(copies[expert]):
                _place(expert, held, room, shares)
        _level(held, shares)
        return cls(len(loads), tuple(tuple(sorted(experts)) for experts in held))

    @classmethod
    def load(cls, path: str | Path) -> "ExpertPlacement":
        """Read the JSON that `save` writes. ValueError, which names the file, when it is not that."""
        try:
            content = json.loads(Path(path).read_text())
            return cls(int(content["num_experts"]), tuple(tuple(map(int, held)) for held in content["ranks"]))
        except (ValueError, TypeError, KeyError) as error:
            form = '{"num_experts": N, "ranks": [[experts of rank 0], …]}'
            raise ValueError(f"{path} is no expert placement {form}: {error!r}") from error

    def save(self, path: str | Path) -> None:
        """Write {"num_experts": N, "ranks": [[experts of rank 0], [experts of rank 1], …]}."""
        Path(path).write_text(json.dumps({"num_experts": self.num_experts, "ranks": self.ranks}) + "\n")

    def local(self, rank: int) -> tuple[int, ...]:
        """The experts of one rank, in the order of its weights."""
        return self.ranks[rank]

    @property
    def num_physical(self) -> int:
        """The number of experts with all their copies."""
        return sum(map(len, self.ranks))


def _copies(loads: Sequence[float], ranks: int, redundant: int) -> list[int]:
    """How many copies each expert gets."""
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


class _Routing(NamedTuple):
    """Where the rows of a rank's tokens go: [tokens * k] rows, token by token."""

    order: Tensor  # the rows sorted by rank and place on it
    counts: Tensor  # [physical experts] int64


class ExpertDispatcher:
    """Takes each token to its experts, on whatever ranks they are, and brings the results back.

    `loads` [num_experts] int64 counts the tokens that this rank sent to each expert since `reset_loads`. It
    is on the device, and reading it waits for the device.

    Raises ValueError when the placement is for another number of ranks than `comm` has.
    """

    def __init__(
        self, comm: Communicator, placement: ExpertPlacement, *, device: Device | None = None
    ) -> None:
        if len(placement.ranks) != comm.size:
            raise ValueError(
                f"the placement is for {len(placement.ranks)} ranks, and the group has {comm.size}"
            )
        self.comm = comm
        self.placement = placement
        self._held = [len(held) for held in placement.ranks]
        homes: list[list[int]] = [[] for _ in range(placement.num_experts)]
        for physical, expert in enumerate(expert for held in placement.ranks for expert in held):
            homes[expert].append(physical)
        most = max(map(len, homes), default=1)
        padded = [home + home[:1] * (most - len(home)) for home in homes]
        self._homes = torch.tensor(padded, dtype=torch.int64, device=device)
        self._copies = torch.tensor([len(home) for home in homes], dtype=torch.int64, device=device)
        of_rank = [rank for rank, held in enumerate(self._held) for _ in range(held)]
        self._rank_of = torch.tensor(of_rank, dtype=torch.int64, device=device)
        self.loads = torch.zeros(placement.num_experts, dtype=torch.int64, device=device)

    def reset_loads(self) -> None:
        """Start counting anew."""
        self.loads.zero_()

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        """Return the weighted sum of each token's experts.

        x: [tokens, hidden], this rank's tokens; every rank must call, also one that has none.
        experts: [tokens, k] int64, k at least 1. weights: [tokens, k].
        `compute(rows [n, hidden], starts [held + 1] int32)` returns [n, hidden] in one dtype on all ranks;
        rows from starts[i] to starts[i + 1] are for the expert `placement.local(rank)[i]`.
        Returns [tokens, hidden] in the dtype of x.

        The sum is in float32 and in the order of k, so it has the same bits on any number of ranks if
        `compute` gives a row the same bits whatever rows are beside it. Tokens take turns at the copies of an
        expert. One rank alone reads nothing back from the device; several read the row counts, once.
        """
        if experts.shape != weights.shape or experts.shape[:1] != x.shape[:1]:
            raise ValueError(
                f"experts {list(experts.shape)} and weights {list(weights.shape)} must both be [tokens, k] "
                f"for x {list(x.shape)}"
            )
        routing = self._route(experts)
        rows = x.index_select(0, routing.order // experts.shape[1])
        if self.comm.size == 1:
            results = _run(compute, rows, routing.counts)
        else:
            results = self._exchange(rows, routing.counts, compute)
        by_token = torch.empty_like(results).index_copy_(0, routing.order, results)
        return _weighted_sum(by_token.view(*experts.shape, x.shape[1]), weights).to(x.dtype)

    def _route(self, experts: Tensor) -> _Routing:
        tokens, k = experts.shape
        chosen = experts.flatten()
        self.loads.scatter_add_(0, chosen, torch.ones_like(chosen))
        turn = torch.arange(tokens, device=experts.device).repeat_interleave(k) + self.comm.rank
        physical = self._homes[chosen, turn % self._copies[chosen]]
        counts = torch.zeros_like(self._rank_of).scatter_add_(0, physical, torch.ones_like(physical))
        return _Routing(physical.argsort(stable=True), counts)

    def _exchange(self, rows: Tensor, counts: Tensor, compute: Compute) -> Tensor:
        """Have every rank compute its experts on the rows of all: [n, hidden], in the order of `rows`."""
        size, held = self.comm.size, self._held[self.comm.rank]
        incoming = self.comm.all_to_all(counts, self._held, [held] * size).view(size, held)
        outgoing = counts.new_zeros(size).index_add_(0, self._rank_of, counts)
        both = torch.cat((outgoing, incoming.sum(1))).tolist()
        send_sizes, recv_sizes = both[:size], both[size:]

        received = self.comm.all_to_all(rows, send_sizes, recv_sizes)
        slots = torch.arange(held, device=counts.device).repeat(size)
        slot_of_row = slots.repeat_interleave(incoming.flatten(), output_size=received.shape[0])
        by_slot = slot_of_row.argsort(stable=True)
        results = _run(compute, received.index_select(0, by_slot), incoming.sum(0))
        returned = torch.empty_like(results).index_copy_(0, by_slot, results)
        return self.comm.all_to_all(returned, recv_sizes, send_sizes)


def _run(compute: Compute, rows: Tensor, counts: Tensor) -> Tensor:
    """`compute` on rows [n, hidden] of which each local expert has `counts` [held]."""
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    results = compute(rows, starts)
    if results.shape != rows.shape:
        raise ValueError(
            f"compute must return {list(rows.shape)} for as many rows, got {list(results.shape)}"
        )
    return results


def _weighted_sum(results: Tensor, weights: Tensor) -> Tensor:
    """[tokens, k, hidden], [tokens, k] -> [tokens, hidden] float32, added in the order of k."""
    total = results.new_zeros(results.shape[0], results.shape[2], dtype=torch.float32)
    for choice in range(results.shape[1]):
        total += results[:, choice] * weights[:, choice, None].float()
    return total
