"""A communicator over gloo, torch.distributed's backend for CPU tensors."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.arguments import resized
from collectives.communicator import CheckedCommunicator, ReduceOp
from collectives.sharding import shard

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
_HALVES = frozenset({torch.float16, torch.bfloat16})
_SMALL = 1 << 17
"""Bytes up to which gloo gathers tensors faster than it reduces them."""


class GlooCommunicator(CheckedCommunicator):
    """CPU tensors among the ranks of a torch.distributed process group whose backend is gloo.

    Ranks are numbered within the group. A rank that dies or never calls makes the others raise RuntimeError,
    at the latest after the group's timeout. Sums of float16 and bfloat16 are in float32 and rounded once.
    TypeError for a dtype that gloo cannot carry.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Use `group`, or the default group of `torch.distributed.init_process_group`.

        Raises ValueError when this process is not in the group, or its backend is not gloo.
        """
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(f"global rank {dist.get_rank()} is not in the process group it was given")
        if dist.get_backend(group) != dist.Backend.GLOO:
            raise ValueError(f"the backend of the process group is {dist.get_backend(group)}, not gloo")
        self.size = dist.get_world_size(group)
        self._group = group

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def close(self) -> None:
        """Destroy the process group; the default group takes all others with it."""
        dist.destroy_process_group(self._group)

    def _check(self, x: Tensor) -> None:
        if x.dtype not in _DTYPES:
            raise TypeError(f"gloo cannot carry {x.dtype}; send a view of it as torch.uint8")

    def _all_reduce(self, x: Tensor, op: ReduceOp) -> None:
        if op == "sum" and x.nbytes <= _SMALL:
            x.copy_(self.all_gather(x.unsqueeze(0)).sum(0, dtype=x.dtype))
        elif op == "sum" and x.dtype in _HALVES:
            sizes = [shard(x.numel(), self.size, rank).size for rank in range(self.size)]
            part = self.reduce_scatter(x.view(-1), sizes)
            x.copy_(self.all_gather(part, 0, sizes).view(x.shape))
        else:
            dist.all_reduce(x, _OPS[op], group=self._group)

    def _all_gather(self, x: Tensor, dim: int, sizes: Sequence[int], out: Tensor | None) -> Tensor:
        # Gloo gathers equal pieces only: a short one is padded, and loses its padding here.
        longest = max(sizes)
        piece = x.contiguous() if x.shape[dim] == longest else _padded(x, dim, longest)
        in_order = dim == 0 and min(sizes) == longest
        gathered = out if in_order and out is not None else piece.new_empty(self.size * piece.numel())
        dist.all_gather_into_tensor(gathered.view(-1), piece.view(-1), group=self._group)
        if in_order:
            return gathered.view(resized(x, dim, sum(sizes))) if out is None else out
        pieces = gathered.view(self.size, *piece.shape)
        return torch.cat([piece.narrow(dim, 0, n) for piece, n in zip(pieces, sizes)], dim, out=out)

    def _reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        # An exchange and a local sum move as many bytes as a ring would, take uneven sizes as they come,
        # and add in a fixed order.
        mine = sizes[self.rank]
        pieces = self._all_to_all(x, sizes, [mine] * self.size)
        return pieces.view(self.size, mine, *x.shape[1:]).sum(0, dtype=x.dtype)

    def _broadcast(self, x: Tensor, src: int) -> None:
        dist.broadcast(x, group=self._group, group_src=src)

    def _all_to_all(self, x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Tensor:
        received = x.new_empty(sum(recv_sizes), *x.shape[1:])
        dist.all_to_all_single(
            received, x.contiguous(), list(recv_sizes), list(send_sizes), group=self._group
        )
        return received

    def _send(self, x: Tensor, dst: int) -> None:
        dist.send(x, group=self._group, group_dst=dst)

    def _recv(self, x: Tensor, src: int) -> None:
        dist.recv(x, group=self._group, group_src=src)


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    """Return `x` at the front of a contiguous tensor of `length` at `dim`; the rest is uninitialised."""
    padded = x.new_empty(resized(x, dim, length))
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    return padded
