"""Communicators over torch.distributed."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.arguments import (
    check_contiguous,
    check_out,
    check_peer,
    check_rank,
    exchange_sizes,
    gather_sizes,
    resized,
    scatter_sizes,
)
from collectives.communicator import ReduceOp
from collectives.sharding import shard

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_GLOO_DTYPES = frozenset(
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


class TorchCommunicator:
    """A torch.distributed process group: gloo for CPU tensors, nccl for CUDA tensors.

    Ranks are numbered within the group. A rank that dies or never calls makes the others raise
    RuntimeError, at the latest after the group's timeout. Half-precision sums are in float32 and rounded
    once, but for `reduce`, and for `all_reduce` over nccl, which round at each step.

    Raises ValueError when this process is not in `group`. Arguments are checked before anything is sent:
    ValueError for shapes, sizes and ranks that do not fit, TypeError for a dtype that gloo cannot carry.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Use `group`, or the default group of `torch.distributed.init_process_group`."""
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(f"global rank {dist.get_rank()} is not in the process group it was given")
        self.size = dist.get_world_size(group)
        self._group = group
        self._gloo = dist.get_backend(group) == dist.Backend.GLOO

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        self._check_in_place(x)
        reduce = _torch_op(op)
        if self._gloo and op == "sum" and x.nbytes <= _SMALL:
            return x.copy_(self.all_gather(x.unsqueeze(0)).sum(0, dtype=x.dtype))
        if self._gloo and op == "sum" and x.dtype in _HALVES:
            sizes = [shard(x.numel(), self.size, rank).size for rank in range(self.size)]
            part = self.reduce_scatter(x.view(-1), sizes)
            return x.copy_(self.all_gather(part, 0, sizes).view(x.shape))
        dist.all_reduce(x, reduce, group=self._group)
        return x

    def all_gather(
        self, x: Tensor, dim: int = 0, sizes: Sequence[int] | None = None, out: Tensor | None = None
    ) -> Tensor:
        self._check_dtype(x)
        sizes = gather_sizes(x, dim, sizes, self.rank, self.size)
        shape = resized(x, dim, sum(sizes))
        if out is not None:
            check_out(out, x, shape)

        # The backends gather equal pieces only, so a short one travels padded, and loses its padding here.
        longest = max(sizes)
        piece = x.contiguous() if x.shape[dim] == longest else _padded(x, dim, longest)
        in_order = dim == 0 and min(sizes) == longest
        gathered = out if in_order and out is not None else piece.new_empty(self.size * piece.numel())
        dist.all_gather_into_tensor(gathered.view(-1), piece.view(-1), group=self._group)
        if in_order:
            return gathered.view(shape) if out is None else out
        pieces = gathered.view(self.size, *piece.shape)
        return torch.cat([piece.narrow(dim, 0, n) for piece, n in zip(pieces, sizes)], dim, out=out)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        # An exchange and a local sum move as many bytes as a ring would, take uneven sizes as they come,
        # and add in a fixed order.
        sizes = scatter_sizes(x, sizes, self.size)
        mine = sizes[self.rank]
        pieces = self.all_to_all(x, sizes, [mine] * self.size)
        return pieces.view(self.size, mine, *x.shape[1:]).sum(0, dtype=x.dtype)

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        self._check_in_place(x)
        check_rank(src, self.size)
        dist.broadcast(x, group=self._group, group_src=src)
        return x

    def reduce(self, x: Tensor, dst: int = 0, op: ReduceOp = "sum") -> Tensor:
        self._check_in_place(x)
        check_rank(dst, self.size)
        dist.reduce(x, op=_torch_op(op), group=self._group, group_dst=dst)
        return x

    def all_to_all(
        self, x: Tensor, send_sizes: Sequence[int] | None = None, recv_sizes: Sequence[int] | None = None
    ) -> Tensor:
        self._check_dtype(x)
        send_sizes, recv_sizes = exchange_sizes(x, send_sizes, recv_sizes, self.size)
        received = x.new_empty(sum(recv_sizes), *x.shape[1:])
        dist.all_to_all_single(
            received, x.contiguous(), list(recv_sizes), list(send_sizes), group=self._group
        )
        return received

    def send(self, x: Tensor, dst: int) -> None:
        self._check_dtype(x)
        check_peer(dst, self.rank, self.size)
        dist.send(x.contiguous(), group=self._group, group_dst=dst)

    def recv(self, x: Tensor, src: int) -> Tensor:
        self._check_in_place(x)
        check_peer(src, self.rank, self.size)
        dist.recv(x, group=self._group, group_src=src)
        return x

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def close(self) -> None:
        """Destroy the process group; the default group takes all others with it."""
        dist.destroy_process_group(self._group)

    def _check_in_place(self, x: Tensor) -> None:
        self._check_dtype(x)
        check_contiguous(x)

    def _check_dtype(self, x: Tensor) -> None:
        if self._gloo and x.dtype not in _GLOO_DTYPES:
            raise TypeError(f"gloo cannot carry {x.dtype}; send a view of it as torch.uint8")


def _torch_op(op: ReduceOp) -> dist.ReduceOp.RedOpType:
    if op not in _OPS:
        raise ValueError(f"op must be one of {', '.join(_OPS)}, got {op!r}")
    return _OPS[op]


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    """`x` at the front of a contiguous tensor that is `length` long at `dim`; what follows is not set."""
    padded = x.new_empty(resized(x, dim, length))
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    return padded
