"""What ranks say to each other, and two ways of saying it: alone, and through torch.distributed."""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

ReduceOp = Literal["sum", "max", "min"]

_TORCH_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
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


class Communicator(Protocol):
    """Collective operations among `size` ranks, of which this process is number `rank`.

    Every rank of the group makes the same calls in the same order, with the same dtypes and, where not
    said otherwise, the same shapes; nobody checks this across ranks, as that would be a collective itself.
    Sizes of uneven pieces are therefore passed in by callers, who know them, and any may be 0.

    `all_reduce`, `broadcast`, `reduce` and `recv` write into their argument, which must be contiguous, and
    return it. A result of the others may share memory with the argument.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce `x` [...] elementwise over the ranks, in place; each rank gets the same bits."""
        ...

    def all_gather(self, x: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        """Concatenate every rank's `x` along `dim`, in rank order.

        x: [..., n, ...] with n at `dim`. `sizes[r]` is rank r's n; without `sizes` all have the same.
        Returns [..., sum(sizes), ...], contiguous when there is more than one rank.
        """
        ...

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Sum `x` [n, ...] over the ranks, and keep this rank's rows of the sum.

        `sizes[r]` rows go to rank r, sum(sizes) = n; without `sizes` all get n / size.
        Returns [sizes[rank], ...].
        """
        ...

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        """Overwrite `x` [...] with that of rank `src`."""
        ...

    def reduce(self, x: Tensor, dst: int = 0, op: ReduceOp = "sum") -> Tensor:
        """Reduce `x` [...] into rank `dst`; on the other ranks the contents of `x` are lost."""
        ...

    def all_to_all(
        self, x: Tensor, send_sizes: Sequence[int] | None = None, recv_sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Send each rank its rows of `x` [n, ...], and get this rank's rows from each, in rank order.

        The first `send_sizes[0]` rows go to rank 0, the next to rank 1, and so on, sum(send_sizes) = n;
        `recv_sizes[r]` rows come from rank r. Without both, every piece is n / size rows.
        Returns [sum(recv_sizes), ...].
        """
        ...

    def send(self, x: Tensor, dst: int) -> None:
        """Send `x` [...] to another rank, which must call `recv`."""
        ...

    def recv(self, x: Tensor, src: int) -> Tensor:
        """Fill `x` [...] with what another rank sends; shape and dtype must be those of the sent tensor."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called it."""
        ...


class LocalCommunicator:
    """The group of one rank: each operation returns its argument and copies nothing."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        return x

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        return x

    def reduce(self, x: Tensor, dst: int = 0, op: ReduceOp = "sum") -> Tensor:
        return x

    def all_to_all(
        self, x: Tensor, send_sizes: Sequence[int] | None = None, recv_sizes: Sequence[int] | None = None
    ) -> Tensor:
        return x

    def send(self, x: Tensor, dst: int) -> None:
        raise ValueError(f"cannot send to rank {dst}: rank 0 is the only one in its group")

    def recv(self, x: Tensor, src: int) -> Tensor:
        raise ValueError(f"cannot receive from rank {src}: rank 0 is the only one in its group")

    def barrier(self) -> None:
        return


class TorchCommunicator:
    """A torch.distributed process group: gloo for CPU tensors, nccl for CUDA tensors.

    Ranks are numbered within the group. A rank that dies or never calls makes the others raise
    RuntimeError, at the latest after the group's timeout. Half-precision reductions are done by the backend
    in the tensor's own dtype, rounding at each step; `reduce_scatter` sums in fp32.

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
        dist.all_reduce(x, _torch_op(op), group=self._group)
        return x

    def all_gather(self, x: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        self._check_dtype(x)
        if sizes is None:
            sizes = [x.shape[dim]] * self.size
        self._check_sizes("sizes", sizes)
        if x.shape[dim] != sizes[self.rank]:
            raise ValueError(
                f"rank {self.rank} gives {x.shape[dim]}, not sizes[{self.rank}] = {sizes[self.rank]}"
            )

        # The backends gather equal pieces only, so a short one travels padded, and loses its padding here.
        longest = max(sizes)
        piece = x.contiguous() if x.shape[dim] == longest else _padded(x, dim, longest)
        gathered = piece.new_empty(self.size, *piece.shape)
        dist.all_gather_into_tensor(gathered.view(-1), piece.view(-1), group=self._group)
        if dim == 0 and min(sizes) == longest:
            return gathered.flatten(0, 1)
        return torch.cat([g.narrow(dim, 0, n) for g, n in zip(gathered, sizes)], dim)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        # An exchange and a local sum move as many bytes as a ring would, take uneven sizes as they come,
        # and add in a fixed order.
        if sizes is None:
            sizes = self._even_sizes(x)
        self._check_sizes("sizes", sizes)
        mine = sizes[self.rank]
        pieces = self.all_to_all(x, sizes, [mine] * self.size)
        return pieces.view(self.size, mine, *x.shape[1:]).sum(0, dtype=x.dtype)

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        self._check_in_place(x)
        self._check_rank(src)
        dist.broadcast(x, group=self._group, group_src=src)
        return x

    def reduce(self, x: Tensor, dst: int = 0, op: ReduceOp = "sum") -> Tensor:
        self._check_in_place(x)
        self._check_rank(dst)
        dist.reduce(x, op=_torch_op(op), group=self._group, group_dst=dst)
        return x

    def all_to_all(
        self, x: Tensor, send_sizes: Sequence[int] | None = None, recv_sizes: Sequence[int] | None = None
    ) -> Tensor:
        self._check_dtype(x)
        if (send_sizes is None) != (recv_sizes is None):
            raise ValueError("all_to_all needs both send_sizes and recv_sizes, or neither")
        if send_sizes is None or recv_sizes is None:
            send_sizes = recv_sizes = self._even_sizes(x)
        self._check_sizes("send_sizes", send_sizes)
        self._check_sizes("recv_sizes", recv_sizes)
        if sum(send_sizes) != x.shape[0]:
            raise ValueError(f"send_sizes {list(send_sizes)} do not add up to the {x.shape[0]} rows given")

        received = x.new_empty(sum(recv_sizes), *x.shape[1:])
        dist.all_to_all_single(
            received, x.contiguous(), list(recv_sizes), list(send_sizes), group=self._group
        )
        return received

    def send(self, x: Tensor, dst: int) -> None:
        self._check_dtype(x)
        self._check_peer(dst)
        dist.send(x.contiguous(), group=self._group, group_dst=dst)

    def recv(self, x: Tensor, src: int) -> Tensor:
        self._check_in_place(x)
        self._check_peer(src)
        dist.recv(x, group=self._group, group_src=src)
        return x

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def _even_sizes(self, x: Tensor) -> list[int]:
        if x.shape[0] % self.size:
            raise ValueError(f"{x.shape[0]} rows cannot be cut evenly for {self.size} ranks; give the sizes")
        return [x.shape[0] // self.size] * self.size

    def _check_sizes(self, name: str, sizes: Sequence[int]) -> None:
        if len(sizes) != self.size or min(sizes) < 0:
            raise ValueError(f"{name} must be {self.size} numbers from 0, one a rank, got {list(sizes)}")

    def _check_in_place(self, x: Tensor) -> None:
        self._check_dtype(x)
        if not x.is_contiguous():
            raise ValueError(f"an operation in place needs a contiguous tensor, got strides {x.stride()}")

    def _check_dtype(self, x: Tensor) -> None:
        if self._gloo and x.dtype not in _GLOO_DTYPES:
            raise TypeError(f"gloo cannot carry {x.dtype}; send a view of it as torch.uint8")

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"rank must be in [0, {self.size}), got {rank}")

    def _check_peer(self, rank: int) -> None:
        self._check_rank(rank)
        if rank == self.rank:
            raise ValueError(f"rank {rank} cannot send to or receive from itself")


def _torch_op(op: ReduceOp) -> dist.ReduceOp.RedOpType:
    if op not in _TORCH_OPS:
        raise ValueError(f"op must be one of {', '.join(_TORCH_OPS)}, got {op!r}")
    return _TORCH_OPS[op]


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    """`x` at the front of a contiguous tensor that is `length` long at `dim`; what follows is not set."""
    shape = list(x.shape)
    shape[dim] = length
    padded = x.new_empty(shape)
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    return padded
