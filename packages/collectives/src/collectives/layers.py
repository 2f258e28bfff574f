"""Linear layers whose weights are sharded over the ranks of a communicator.

Each layer holds one rank's shard and takes full checkpoint tensors, so a loader need not know how it is cut.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from collectives.communicator import Communicator
from collectives.sharding import Shard, shard

Matmul = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Reduce = Callable[[Tensor], object]
Device = torch.device | str | int


class ParallelLayer(nn.Module):
    """A layer with a communicator, whose parameters are made by torch.empty and loaded later."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.comm = comm

    def _empty(self, *shape: int, dtype: torch.dtype | None, device: Device | None) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

    @torch.no_grad()
    def _load_shard(
        self, name: str, target: Tensor, full: Tensor, shape: Sequence[int], cut: Shard, dim: int = 0
    ) -> None:
        """Copy the range `cut` along `dim` of `full` [*shape] to the front of `target`, and zero the rest."""
        if list(full.shape) != list(shape):
            layer = type(self).__name__
            raise ValueError(f"{layer} {name}: expected shape {list(shape)}, got {list(full.shape)}")
        target.narrow(dim, 0, cut.size).copy_(full.narrow(dim, cut.start, cut.size))
        target.narrow(dim, cut.size, target.shape[dim] - cut.size).zero_()


class ParallelLinear(ParallelLayer):
    """A layer with a weight, an optional bias, and a matrix product that can be replaced.

    `matmul(x, weight, bias)` starts as torch.nn.functional.linear; assign another for packed or quantised
    weights once everything is loaded, and with it, where that is needed, another Parameter for `weight`.
    """

    matmul: Matmul
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        comm: Communicator,
        rows: int,
        columns: int,
        bias: bool,
        dtype: torch.dtype | None,
        device: Device | None,
    ) -> None:
        super().__init__(comm)
        self.matmul = F.linear
        self.weight = self._empty(rows, columns, dtype=dtype, device=device)
        self.bias = self._empty(rows, dtype=dtype, device=device) if bias else None

    def _loadable_bias(self) -> Tensor:
        if self.bias is None:
            raise ValueError(f"{type(self).__name__} was made without a bias, and cannot load one")
        return self.bias


class ColumnParallelLinear(ParallelLinear):
    """y = x Wᵀ + b, with the output features sharded over the ranks.

    Projections of the same input can be merged into one product: `parts` has the output features of each, as
    of q, k, v or of gate, up. Each part is cut by itself; this rank's output is its shard of every part, side
    by side, and `y.split(layer.local_parts, -1)` takes them apart.

    `cuts[rank][part]` is the range that a rank holds, as for attention heads: see `attention_shards`.
    Adjacent ranks may hold the same range. By default features are cut as evenly as they come.

    Forward: x [..., in_features], the same on all ranks -> [..., sum(local_parts)].
    Weight: [sum(local_parts), in_features].

    Raises ValueError when cuts do not cover the parts in order.
    """

    def __init__(
        self,
        in_features: int,
        parts: int | Sequence[int],
        *,
        bias: bool,
        comm: Communicator,
        cuts: Sequence[Sequence[Shard]] | None = None,
        dtype: torch.dtype | None = None,
        device: Device | None = None,
    ) -> None:
        parts = (parts,) if isinstance(parts, int) else tuple(parts)
        if cuts is None:
            cuts = [[shard(part, comm.size, rank) for part in parts] for rank in range(comm.size)]
        else:
            _check_cuts(cuts, parts, comm.size, replicas=True)
        local_parts = tuple(cut.size for cut in cuts[comm.rank])
        super().__init__(comm, sum(local_parts), in_features, bias, dtype, device)
        self.in_features = in_features
        self.parts = parts
        self.local_parts = local_parts
        self._cuts = cuts[comm.rank]

    def load_weight(self, tensor: Tensor, part: int = 0) -> None:
        """Take this rank's rows of one part's full weight [parts[part], in_features]."""
        self._check_part(part)
        shape = (self.parts[part], self.in_features)
        self._load_shard(
            self._name("weight", part), self._local(self.weight, part), tensor, shape, self._cuts[part]
        )

    def load_bias(self, tensor: Tensor, part: int = 0) -> None:
        """Take this rank's entries of one part's full bias [parts[part]]."""
        self._check_part(part)
        target = self._local(self._loadable_bias(), part)
        self._load_shard(self._name("bias", part), target, tensor, (self.parts[part],), self._cuts[part])

    def forward(self, x: Tensor) -> Tensor:
        return self.matmul(x, self.weight, self.bias)

    def _local(self, parameter: Tensor, part: int) -> Tensor:
        return parameter.narrow(0, sum(self.local_parts[:part]), self.local_parts[part])

    def _name(self, kind: str, part: int) -> str:
        return kind if len(self.parts) == 1 else f"{kind}[{part}]"

    def _check_part(self, part: int) -> None:
        if not 0 <= part < len(self.parts):
            raise ValueError(f"part must be in [0, {len(self.parts)}) for parts {self.parts}, got {part}")


class RowParallelLinear(ParallelLinear):
    """y = x Wᵀ + b, with the input features sharded over the ranks and the products summed by all_reduce.

    Its input on each rank is the output of a ColumnParallelLinear of `in_features`; give it the `cuts` of
    that part, `cuts[rank]`. The bias is added once, on rank 0. `reduce(y)` sums y over the ranks in place; it
    is `comm.all_reduce` unless another is given, as one that calls it in a way of its own.

    Forward: x [..., this rank's share of in_features] -> [..., out_features], the same on all ranks.
    Weight: [out_features, this rank's share of in_features].

    Raises ValueError when `cuts` do not cover the features in order, or overlap: replicas would be summed
    twice.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        comm: Communicator,
        cuts: Sequence[Shard] | None = None,
        reduce: Reduce | None = None,
        dtype: torch.dtype | None = None,
        device: Device | None = None,
    ) -> None:
        if cuts is None:
            cut = shard(in_features, comm.size, comm.rank)
        else:
            _check_cuts([[of_rank] for of_rank in cuts], (in_features,), comm.size, replicas=False)
            cut = cuts[comm.rank]
        super().__init__(comm, out_features, cut.size, bias, dtype, device)
        self.in_features = in_features
        self.out_features = out_features
        self._cut = cut
        self._reduce = comm.all_reduce if reduce is None else reduce

    def load_weight(self, tensor: Tensor) -> None:
        """Take this rank's columns of the full weight [out_features, in_features]."""
        self._load_shard(
            "weight", self.weight, tensor, (self.out_features, self.in_features), self._cut, dim=1
        )

    def load_bias(self, tensor: Tensor) -> None:
        """Take the bias [out_features]; every rank holds it, rank 0 adds it."""
        whole = Shard(0, self.out_features)
        self._load_shard("bias", self._loadable_bias(), tensor, (self.out_features,), whole)

    def forward(self, x: Tensor) -> Tensor:
        y = self.matmul(x, self.weight, self.bias if self.comm.rank == 0 else None)
        self._reduce(y)
        return y


def _check_cuts(cuts: Sequence[Sequence[Shard]], parts: Sequence[int], ranks: int, replicas: bool) -> None:
    """ValueError unless each part is covered once in rank order, or by replicas on adjacent ranks."""
    if len(cuts) != ranks or any(len(of_rank) != len(parts) for of_rank in cuts):
        raise ValueError(f"cuts must have {len(parts)} ranges for each of {ranks} ranks, got {cuts}")
    for part, length in enumerate(parts):
        ranges = [tuple(of_rank[part]) for of_rank in cuts]
        covered = 0
        for rank, (start, stop) in enumerate(ranges):
            if replicas and rank > 0 and ranges[rank - 1] == (start, stop):
                continue
            if start != covered or stop < start:
                break
            covered = stop
        else:
            if covered == length:
                continue
        wanted = "in the order of ranks" + (", replicas on adjacent ranks" if replicas else ", each once")
        raise ValueError(f"cuts {ranges} do not cover the {length} features of part {part} {wanted}")
