"""Linear layers whose weights are cut over the ranks of a communicator.

Each layer holds one rank's slice and takes full checkpoint tensors, so a loader need not know how it is cut.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from collectives.communicator import Communicator
from collectives.sharding import Shard, shard

Matmul = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Device = torch.device | str | int


class ParallelLayer(nn.Module):
    """A communicator, parameters made with torch.empty, and a record of those that await their values."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.comm = comm
        self._missing: list[str] = []

    def missing(self) -> list[str]:
        """Parameters that were not loaded yet: `weight`, `bias`, or by part `weight[0]`, `weight[1]`."""
        return list(self._missing)

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
        if name in self._missing:
            self._missing.remove(name)


class ParallelLinear(ParallelLayer):
    """A layer that multiplies, by a kernel that can be replaced.

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
        self._missing = ["weight", "bias"] if bias else ["weight"]

    def _loadable_bias(self) -> Tensor:
        if self.bias is None:
            raise ValueError(f"{type(self).__name__} was made without a bias, and cannot load one")
        return self.bias


class ColumnParallelLinear(ParallelLinear):
    """y = x Wᵀ + b, with the output features cut over the ranks.

    Projections of the same input can be merged into one product: `parts` has the output features of each, as
    of q, k, v or of gate, up. Each part is cut by itself; this rank's output is its slice of every part, side
    by side, and `y.split(layer.local_parts, -1)` takes them apart.

    `units` says of how many units, such as attention heads, each part is made (an int: all parts). Units are
    never cut, and a part with fewer units than ranks is replicated, each unit to the same number of
    neighbouring ranks. `cuts` says outright what each rank holds, `cuts[rank][part]`, as for heads that do
    not come evenly: see `attention_shards`. With neither, features are cut as evenly as they come.

    With `gather_output` every rank returns all of y, parts in order.

    Forward: x [..., in_features], the same on all ranks -> [..., sum(local_parts)], or [..., sum(parts)]
    when gathered. Weight: [sum(local_parts), in_features].

    Raises ValueError when units cannot be given to the ranks evenly, or cuts do not cover the parts in order.
    """

    def __init__(
        self,
        in_features: int,
        parts: int | Sequence[int],
        *,
        bias: bool,
        comm: Communicator,
        gather_output: bool = False,
        units: int | Sequence[int] | None = None,
        cuts: Sequence[Sequence[Shard]] | None = None,
        dtype: torch.dtype | None = None,
        device: Device | None = None,
    ) -> None:
        parts = (parts,) if isinstance(parts, int) else tuple(parts)
        _check_one_way(units, cuts)
        if cuts is None:
            cuts = [_cut_parts(parts, units, comm.size, rank) for rank in range(comm.size)]
        else:
            _check_cuts(cuts, parts, comm.size, replicas=True)
        local_parts = tuple(cut.size for cut in cuts[comm.rank])
        super().__init__(comm, sum(local_parts), in_features, bias, dtype, device)
        self.in_features = in_features
        self.parts = parts
        self.local_parts = local_parts
        self._cuts = cuts[comm.rank]
        self._gather = _GatherParts(cuts) if gather_output and comm.size > 1 else None
        self._missing = [self._name(kind, part) for kind in self._missing for part in range(len(parts))]

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
        y = self.matmul(x, self.weight, self.bias)
        return y if self._gather is None else self._gather(y, self.comm)

    def _local(self, parameter: Tensor, part: int) -> Tensor:
        return parameter.narrow(0, sum(self.local_parts[:part]), self.local_parts[part])

    def _name(self, kind: str, part: int) -> str:
        return kind if len(self.parts) == 1 else f"{kind}[{part}]"

    def _check_part(self, part: int) -> None:
        if not 0 <= part < len(self.parts):
            raise ValueError(f"part must be in [0, {len(self.parts)}) for parts {self.parts}, got {part}")


class RowParallelLinear(ParallelLinear):
    """y = x Wᵀ + b, with the input features cut over the ranks and the products summed.

    It takes what a ColumnParallelLinear of `in_features` outputs leaves on each rank; give both the same
    `units`, or here the `cuts` of that part, `cuts[rank]`. The bias is added once, on rank 0: with
    `reduce=False` the ranks return terms that sum to y, for a caller that adds up several such layers before
    one all_reduce.

    Forward: x [..., this rank's share of in_features] -> [..., out_features], the same on all ranks when
    reduced. Weight: [out_features, this rank's share of in_features].

    Raises ValueError when `units` is not a multiple of the ranks, or `cuts` overlap: what is replicated would
    be summed twice.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        comm: Communicator,
        reduce: bool = True,
        units: int | None = None,
        cuts: Sequence[Shard] | None = None,
        dtype: torch.dtype | None = None,
        device: Device | None = None,
    ) -> None:
        _check_one_way(units, cuts)
        if units is not None and units % comm.size:
            raise ValueError(
                f"{units} units (heads) must be a multiple of the {comm.size} ranks they are cut for"
            )
        if cuts is None:
            cut = shard(in_features, comm.size, comm.rank, units)
        else:
            _check_cuts([[of_rank] for of_rank in cuts], (in_features,), comm.size, replicas=False)
            cut = cuts[comm.rank]
        super().__init__(comm, out_features, cut.size, bias, dtype, device)
        self.in_features = in_features
        self.out_features = out_features
        self._cut = cut
        self._reduce = reduce and comm.size > 1

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
        return self.comm.all_reduce(y) if self._reduce else y


class _GatherParts:
    """Turns the outputs of all ranks, each with its slice of every part, into whole parts in order."""

    def __init__(self, cuts: Sequence[Sequence[Shard]]) -> None:
        """`cuts[rank][part]` is what a rank holds of a part."""
        self._widths = [sum(cut.size for cut in of_rank) for of_rank in cuts]
        self._pieces: list[Shard] = []
        for part in range(len(cuts[0])):
            for rank, of_rank in enumerate(cuts):
                if rank > 0 and of_rank[part] == cuts[rank - 1][part]:
                    continue  # a replica of the neighbour's
                start = sum(self._widths[:rank]) + sum(cut.size for cut in of_rank[:part])
                self._append(Shard(start, start + of_rank[part].size))

    def __call__(self, y: Tensor, comm: Communicator) -> Tensor:
        gathered = comm.all_gather(y, dim=-1, sizes=self._widths)
        pieces = [gathered[..., piece.start : piece.stop] for piece in self._pieces]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)

    def _append(self, piece: Shard) -> None:
        if self._pieces and self._pieces[-1].stop == piece.start:
            piece = Shard(self._pieces.pop().start, piece.stop)
        self._pieces.append(piece)


def _cut_parts(
    parts: Sequence[int], units: int | Sequence[int] | None, ranks: int, rank: int
) -> tuple[Shard, ...]:
    """A rank's slice of each part."""
    each = [units] * len(parts) if units is None or isinstance(units, int) else list(units)
    if len(each) != len(parts):
        raise ValueError(f"units {each} must have one entry for each of the parts {list(parts)}")
    return tuple(shard(length, ranks, rank, count) for length, count in zip(parts, each))


def _check_one_way(units: object, cuts: object) -> None:
    if units is not None and cuts is not None:
        raise ValueError("units and cuts both say how a layer is cut; give one of them")


def _check_cuts(cuts: Sequence[Sequence[Shard]], parts: Sequence[int], ranks: int, replicas: bool) -> None:
    """ValueError unless each part is covered in the order of ranks, once, or by replicas on neighbours."""
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
        wanted = "in the order of ranks" + (", replicas on neighbours" if replicas else ", each once")
        raise ValueError(f"cuts {ranges} do not cover the {length} features of part {part} {wanted}")
