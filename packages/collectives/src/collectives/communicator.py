"""The interface of communicators, the checks that its implementations share, and the group of one rank."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, Protocol, get_args

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

ReduceOp = Literal["sum", "max", "min"]
_OPS = get_args(ReduceOp)


class Communicator(Protocol):
    """Collective operations among `size` ranks, of which this process is number `rank`.

    Every rank of the group makes the same calls in the same order, with the same dtypes and, where not
    said otherwise, the same shapes. This is not checked across ranks, which would take a collective itself:
    callers pass in the sizes of uneven pieces, any of which may be 0.

    `all_reduce`, `broadcast` and `recv` write into their argument, which must be contiguous, and return it.
    A result of the others may share memory with the argument.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce `x` [...] elementwise over the ranks, in place; each rank gets the same bits."""
        ...

    def all_gather(
        self, x: Tensor, dim: int = 0, sizes: Sequence[int] | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Concatenate every rank's `x` along `dim`, in rank order.

        x: [..., n, ...] with n at `dim`. `sizes[r]` is rank r's n; without `sizes` all have the same.
        Returns [..., sum(sizes), ...], contiguous when there is more than one rank; that is `out` when given,
        which must be contiguous and of that shape, and of the dtype and device of `x`.
        """
        ...

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Sum `x` [n, ...] over the ranks, and keep this rank's rows of the sum.

        `sizes[r]` rows go to rank r, sum(sizes) = n; without `sizes` all get n / size.
        Returns [sizes[rank], ...].
        """
        ...

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        """Overwrite `x` [...] on every rank with the `x` of rank `src`."""
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
        """Receive from another rank into `x` [...], which has the shape and dtype of the sent tensor."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called it."""
        ...

    def close(self) -> None:
        """Release the communicator's resources, without waiting for other ranks; it cannot be used again."""
        ...


class CheckedCommunicator(ABC):
    """A communicator that checks arguments before anything is sent, and leaves the sending to subclasses.

    ValueError for shapes, sizes and ranks that do not fit; `_check` says which tensors cannot be carried.
    """

    rank: int
    size: int

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        self._check_in_place(x)
        if op not in _OPS:
            raise ValueError(f"op must be one of {', '.join(_OPS)}, got {op!r}")
        self._all_reduce(x, op)
        return x

    def all_gather(
        self, x: Tensor, dim: int = 0, sizes: Sequence[int] | None = None, out: Tensor | None = None
    ) -> Tensor:
        self._check(x)
        sizes = gather_sizes(x, dim, sizes, self.rank, self.size)
        if out is not None:
            check_out(out, x, resized(x, dim, sum(sizes)))
        return self._all_gather(x, dim, sizes, out)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        self._check(x)
        return self._reduce_scatter(x, scatter_sizes(x, sizes, self.size))

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        self._check_in_place(x)
        check_rank(src, self.size)
        self._broadcast(x, src)
        return x

    def all_to_all(
        self, x: Tensor, send_sizes: Sequence[int] | None = None, recv_sizes: Sequence[int] | None = None
    ) -> Tensor:
        self._check(x)
        return self._all_to_all(x, *exchange_sizes(x, send_sizes, recv_sizes, self.size))

    def send(self, x: Tensor, dst: int) -> None:
        self._check(x)
        check_peer(dst, self.rank, self.size)
        self._send(x.contiguous(), dst)

    def recv(self, x: Tensor, src: int) -> Tensor:
        self._check_in_place(x)
        check_peer(src, self.rank, self.size)
        self._recv(x, src)
        return x

    def _check_in_place(self, x: Tensor) -> None:
        self._check(x)
        check_contiguous(x)

    @abstractmethod
    def _check(self, x: Tensor) -> None: ...

    @abstractmethod
    def _all_reduce(self, x: Tensor, op: ReduceOp) -> None: ...

    @abstractmethod
    def _all_gather(self, x: Tensor, dim: int, sizes: Sequence[int], out: Tensor | None) -> Tensor: ...

    @abstractmethod
    def _reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor: ...

    @abstractmethod
    def _broadcast(self, x: Tensor, src: int) -> None: ...

    @abstractmethod
    def _all_to_all(self, x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Tensor: ...

    @abstractmethod
    def _send(self, x: Tensor, dst: int) -> None: ...

    @abstractmethod
    def _recv(self, x: Tensor, src: int) -> None: ...


class LocalCommunicator:
    """The group of one rank: each operation returns its argument, and copies only into a given `out`."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        return x

    def all_gather(
        self, x: Tensor, dim: int = 0, sizes: Sequence[int] | None = None, out: Tensor | None = None
    ) -> Tensor:
        if out is None:
            return x
        check_out(out, x, x.shape)
        return out.copy_(x)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        return x

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
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

    def close(self) -> None:
        return
