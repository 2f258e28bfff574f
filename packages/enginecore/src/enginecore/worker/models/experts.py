"""A mixture of experts in the place of a feed-forward network."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from collectives import ExpertDispatcher, LocalCommunicator, Shard, shard
from enginecore.worker.models.feed_forward import activation
from enginecore.worker.models.norms import copy_checked
from enginecore.worker.models.parallel import ModelParallel
from enginecore.worker.models.spec import DecoderSpec, ExpertSpec
from pagedattn import grouped_matmul, host_call


class Router(nn.Module):
    """Sends each token to the `top_k` experts that it scores highest."""

    def __init__(self, spec: DecoderSpec, experts: ExpertSpec) -> None:
        super().__init__()
        self.top_k = experts.top_k
        self.normalise = experts.normalise
        self.weight = nn.Parameter(torch.empty(experts.count, spec.hidden_size), requires_grad=False)

    def load_weight(self, weight: Tensor) -> None:
        """Take the checkpoint's weight [experts, hidden]."""
        copy_checked(weight, self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights float32 and experts int64, both [tokens, top_k], of x [tokens, hidden]."""
        scores = F.linear(x, self.weight).float().softmax(-1)
        weights, experts = scores.topk(self.top_k, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, experts


class ExpertWeights(nn.Module):
    """The gated networks of `count` experts, of each the inner features in `cut`."""

    def __init__(self, spec: DecoderSpec, inner: int, count: int, cut: Shard) -> None:
        """`inner` is the number of inner features of a whole expert."""
        super().__init__()
        hidden = spec.hidden_size
        self.up = nn.Parameter(torch.empty(count, 2 * cut.size, hidden), requires_grad=False)
        """The gate's projection, then that to be gated: [experts, 2 inner, hidden]."""
        self.down = nn.Parameter(torch.empty(count, hidden, cut.size), requires_grad=False)
        self.activation = activation(spec)
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

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        """Put x [rows, hidden], sorted by expert, through the experts.

        Rows starts[e] to starts[e + 1], int32 [experts + 1], are for expert e. Returns [rows, hidden], of
        experts that are cut a term of the sum over ranks.
        """
        return grouped_matmul(self.activation(grouped_matmul(x, self.up, starts)), self.down, starts)

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
        self._tp = parallel.tp
        self._spread = parallel.ep is not None
        comm = parallel.ep or LocalCommunicator()
        placement = parallel.placement(spec, layer)
        if placement.num_experts != experts.count:
            raise ValueError(
                f"the placement is for {placement.num_experts} experts, and the model has {experts.count}"
            )
        inner = experts.intermediate_size
        cut = Shard(0, inner) if self._spread else shard(inner, self._tp.size, self._tp.rank)
        self.dispatcher = ExpertDispatcher(comm, placement)
        self._held = placement.local(comm.rank)
        self.experts = ExpertWeights(spec, inner, len(self._held), cut)

    @property
    def step_width(self) -> int:
        """Elements for each token of its experts' inputs, projections, activations and outputs together."""
        inner = self.experts.down.shape[2]
        return self.router.top_k * (2 * self.experts.down.shape[1] + 3 * inner)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [tokens, hidden], the same on all tensor-parallel ranks, put through its experts."""
        out = torch.empty_like(x)
        host_call(self._write, x, out)
        return out

    def _write(self, x: Tensor, out: Tensor) -> None:
        out.copy_(self._exchange(x))

    def _exchange(self, x: Tensor) -> Tensor:
        if not self._spread:
            return self._tp.all_reduce(self._dispatch(x))
        # Every rank has all tokens of its replica: each takes some to their experts, none takes one twice.
        cuts = [shard(x.shape[0], self._tp.size, rank) for rank in range(self._tp.size)]
        own = cuts[self._tp.rank]
        y = self._dispatch(x[own.start : own.stop])
        return self._tp.all_gather(y, sizes=[cut.size for cut in cuts])

    def run_without_tokens(self) -> None:
        """Put what other ranks send through this rank's experts, in a step for which it has no token."""
        if self._spread:
            weight = self.router.weight
            self._dispatch(weight.new_empty(0, weight.shape[1]))

    def _dispatch(self, x: Tensor) -> Tensor:
        weights, experts = self.router(x)
        return self.dispatcher.forward(x, experts, weights, self.experts)

    def loaders(self) -> dict[str, Callable[[Tensor], None]]:
        """Return where the tensors go; those of experts that only other ranks hold go nowhere."""
        found: dict[str, Callable[[Tensor], None]] = {"gate.weight": self.router.load_weight}
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
