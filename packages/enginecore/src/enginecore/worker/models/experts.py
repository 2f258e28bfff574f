"""A mixture of experts in the place of a feed-forward network."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from collectives import ColumnParallelLinear, ExpertDispatcher, LocalCommunicator, Shard, shard
from enginecore.worker.models.feed_forward import activation
from enginecore.worker.models.parallel import ModelParallel, all_reduce_of
from enginecore.worker.models.spec import DecoderSpec, ExpertSpec
from pagedattn import (
    PackedExperts,
    Routing,
    group_by_expert,
    grouped_linear,
    host_call,
    top_k_softmax,
    weighted_sum,
)


class Router(nn.Module):
    """Sends each token to the `top_k` experts that it scores highest."""

    def __init__(self, spec: DecoderSpec, experts: ExpertSpec) -> None:
        super().__init__()
        self.top_k = experts.top_k
        self.normalise = experts.normalise
        self.gate = ColumnParallelLinear(
            spec.hidden_size, experts.count, bias=False, comm=LocalCommunicator()
        )

    def forward(self, x: Tensor) -> Routing:
        """Return weights and experts [tokens, top_k] of x [tokens, hidden]."""
        return top_k_softmax(self.gate(x), self.top_k, normalise=self.normalise)


class ExpertWeights(nn.Module):
    """The gated networks of `count` experts, of each the inner features in `cut`.

    `pack` must be called once everything is loaded.
    """

    def __init__(self, spec: DecoderSpec, inner: int, count: int, cut: Shard) -> None:
        """`inner` is the number of inner features of a whole expert."""
        super().__init__()
        hidden = spec.hidden_size
        self.up = nn.Parameter(torch.empty(count, 2 * cut.size, hidden), requires_grad=False)
        """The gate's projection, then that to be gated: [experts, 2 inner, hidden]."""
        self.down = nn.Parameter(torch.empty(count, hidden, cut.size), requires_grad=False)
        self.packed: tuple[PackedExperts, PackedExperts] | None = None
        """What was `up` and `down`, which `pack` leaves empty."""
        self.activation = activation(spec)
        self.hidden_size, self.inner_size = hidden, cut.size
        self._full = [inner, hidden]
        self._cut = cut

    def load_up(self, weight: Tensor, *, slot: int, part: int) -> None:
        """Take part 0, the gate's, or 1 of an expert's weights [intermediate, hidden] into `slot`."""
        self._check(weight, self._full)
        start, size = self._cut.start, self._cut.size
        self.up[slot].narrow(0, part * size, size).copy_(weight.narrow(0, start, size))

    def load_down(self, weight: Tensor, *, slot: int) -> None:
        """Take an expert's output projection [hidden, intermediate] into `slot`."""
        self._check(weight, self._full[::-1])
        self.down[slot].copy_(weight.narrow(1, self._cut.start, self._cut.size))

    def pack(
        self, pack_up: Callable[[Tensor], PackedExperts], pack_down: Callable[[Tensor], PackedExperts]
    ) -> None:
        """Put packed weights in the place of the plain ones."""
        up = pack_up(self.up)
        self.up = nn.Parameter(self.up.new_empty(0), requires_grad=False)
        self.packed = up, pack_down(self.down)
        self.down = nn.Parameter(self.down.new_empty(0), requires_grad=False)

    def forward(self, x: Tensor, starts: Tensor, index: Tensor | None = None) -> Tensor:
        """Put x [rows, hidden], sorted by expert, or its rows `index` int32 [rows], through the experts.

        Rows starts[e] to starts[e + 1], int32 [experts + 1], are for expert e. Returns [rows, hidden], of
        experts that are cut a term of the sum over ranks.
        """
        assert self.packed is not None, "the weights of experts are not packed"
        up, down = self.packed
        return grouped_linear(self.activation(grouped_linear(x, up, starts, index)), down, starts)

    def _check(self, weight: Tensor, shape: list[int]) -> None:
        if list(weight.shape) != shape:
            raise ValueError(f"expert weight: expected shape {shape}, got {list(weight.shape)}")


class SparseFeedForward(nn.Module):
    """Router and experts: a slice of every expert, or with expert parallelism this rank's whole ones.

    Raises ValueError when the placement is for another number of experts or ranks.
    """

    def __init__(self, spec: DecoderSpec, experts: ExpertSpec, parallel: ModelParallel, layer: int) -> None:
        super().__init__()
        self.router = Router(spec, experts)
        self._hidden_size = spec.hidden_size
        self._tp = parallel.tp
        self._spread = parallel.ep is not None and parallel.ep.size > 1
        self._reduce = all_reduce_of(parallel.tp)
        comm = parallel.ep or LocalCommunicator()
        placement = parallel.placement(spec, layer)
        if placement.num_experts != experts.count:
            raise ValueError(
                f"the placement is for {placement.num_experts} experts, and the model has {experts.count}"
            )
        inner = experts.intermediate_size
        cut = Shard(0, inner) if self._spread else shard(inner, self._tp.size, self._tp.rank)
        self.dispatcher = ExpertDispatcher(comm, placement)
        self._held = placement.local(comm.rank) if self._spread else tuple(range(experts.count))
        self.experts = ExpertWeights(spec, inner, len(self._held), cut)

    @property
    def step_width(self) -> int:
        """Elements for each token of its experts' inputs, projections, activations and outputs together."""
        return self.router.top_k * (2 * self.experts.hidden_size + 3 * self.experts.inner_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [tokens, hidden], the same on all tensor-parallel ranks, put through its experts."""
        if self._spread:
            out = torch.empty_like(x)
            host_call(self._exchange, x, out)
            return out
        weights, experts = self.router(x)
        groups = group_by_expert(experts, len(self._held), loads=self.dispatcher.loads)
        results = self.experts(x, groups.starts, groups.index)
        out = weighted_sum(results, groups.places, weights)
        self._reduce(out)
        return out

    def _exchange(self, x: Tensor, out: Tensor) -> None:
        # Every rank has all tokens of its replica: each takes some to their experts, none takes one twice.
        cuts = [shard(x.shape[0], self._tp.size, rank) for rank in range(self._tp.size)]
        own = cuts[self._tp.rank]
        y = self._dispatch(x[own.start : own.stop])
        self._tp.all_gather(y, sizes=[cut.size for cut in cuts], out=out)

    def run_without_tokens(self) -> None:
        """Put what other ranks send through this rank's experts, in a step for which it has no token."""
        if self._spread:
            self._dispatch(self.experts.up.new_empty(0, self._hidden_size))

    def _dispatch(self, x: Tensor) -> Tensor:
        weights, experts = self.router(x)
        return self.dispatcher.forward(x, experts.long(), weights, self.experts)

    def loaders(self) -> dict[str, Callable[[Tensor], None]]:
        """Return where the tensors go; those of experts that only other ranks hold go nowhere."""
        found: dict[str, Callable[[Tensor], None]] = {"gate.weight": self.router.gate.load_weight}
        for expert in range(self.dispatcher.placement.num_experts):
            gate, up, down = (f"experts.{expert}.{name}_proj.weight" for name in ("gate", "up", "down"))
            if expert not in self._held:
                found |= dict.fromkeys((gate, up, down), _leave)
                continue
            slot = self._held.index(expert)
            found[gate] = partial(self.experts.load_up, slot=slot, part=0)
            found[up] = partial(self.experts.load_up, slot=slot, part=1)
            found[down] = partial(self.experts.load_down, slot=slot)
        return found


def _leave(weight: Tensor) -> None:
    """Take nothing: another rank has this expert."""
