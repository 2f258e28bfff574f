"""Expert parallelism: dispatch tokens to experts on all ranks, and combine the results."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from collectives.communicator import Communicator
from collectives.layers import Device
from collectives.placement import ExpertPlacement

Compute = Callable[[Tensor, Tensor], Tensor]


class _Routing(NamedTuple):
    """The destination of a rank's [tokens * k] rows, which are in the order of tokens."""

    order: Tensor  # indices of the rows, sorted by rank and by expert on it
    counts: Tensor  # [copies of experts] int64: rows for each


class ExpertDispatcher:
    """Dispatches tokens to their experts by all_to_all, and combines the results.

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
        """Set `loads` to zero."""
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
        """Compute rows [n, hidden] on the ranks of their experts; return results in the order of `rows`."""
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
    """Call `compute` on rows [n, hidden], sorted by local expert, `counts` [held] for each."""
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    results = compute(rows, starts)
    if results.shape != rows.shape:
        raise ValueError(
            f"compute must return {list(rows.shape)} for as many rows, got {list(results.shape)}"
        )
    return results


def _weighted_sum(results: Tensor, weights: Tensor) -> Tensor:
    """Combine [tokens, k, hidden] by weights [tokens, k] into [tokens, hidden] float32, in the order of k."""
    total = results.new_zeros(results.shape[0], results.shape[2], dtype=torch.float32)
    for choice in range(results.shape[1]):
        total += results[:, choice] * weights[:, choice, None].float()
    return total
