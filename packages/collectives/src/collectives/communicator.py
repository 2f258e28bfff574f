"""What ranks say to each other, and the way of saying it alone."""

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor

from collectives.arguments import check_out

ReduceOp = Literal["sum", "max", "min"]


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

    def close(self) -> None:
        """Give back what the communicator holds; it cannot be used again. Other ranks are not waited for."""
        ...


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

    def close(self) -> None:
        return
