"""Checks of the arguments of communicators, made before anything is sent."""

from collections.abc import Sequence

from torch import Tensor


def check_rank(rank: int, ranks: int) -> None:
    """ValueError unless `rank` is one of `ranks`."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be in [0, {ranks}), got {rank}")


def check_peer(peer: int, rank: int, ranks: int) -> None:
    """ValueError unless `peer` is another of `ranks`."""
    check_rank(peer, ranks)
    if peer == rank:
        raise ValueError(f"rank {peer} cannot send to or receive from itself")


def check_contiguous(x: Tensor) -> None:
    """ValueError unless `x` can be written to as one run of memory."""
    if not x.is_contiguous():
        raise ValueError(f"an operation in place needs a contiguous tensor, got strides {x.stride()}")


def check_sizes(name: str, sizes: Sequence[int], ranks: int) -> None:
    """ValueError unless `sizes` is a number from 0 for each rank."""
    if len(sizes) != ranks or min(sizes) < 0:
        raise ValueError(f"{name} must be {ranks} numbers from 0, one a rank, got {list(sizes)}")


def even_sizes(x: Tensor, ranks: int) -> list[int]:
    """Return the sizes of the rows of `x` in equal pieces. ValueError when they do not divide."""
    if x.shape[0] % ranks:
        raise ValueError(f"{x.shape[0]} rows cannot be cut evenly for {ranks} ranks; give the sizes")
    return [x.shape[0] // ranks] * ranks


def gather_sizes(x: Tensor, dim: int, sizes: Sequence[int] | None, rank: int, ranks: int) -> Sequence[int]:
    """Return every rank's length along `dim` in an all_gather of `x`."""
    if sizes is None:
        return [x.shape[dim]] * ranks
    check_sizes("sizes", sizes, ranks)
    if x.shape[dim] != sizes[rank]:
        raise ValueError(f"rank {rank} gives {x.shape[dim]}, not sizes[{rank}] = {sizes[rank]}")
    return sizes


def scatter_sizes(x: Tensor, sizes: Sequence[int] | None, ranks: int) -> Sequence[int]:
    """Return every rank's number of rows in a reduce_scatter of `x`."""
    if sizes is None:
        return even_sizes(x, ranks)
    check_sizes("sizes", sizes, ranks)
    if sum(sizes) != x.shape[0]:
        raise ValueError(f"sizes {list(sizes)} do not add up to the {x.shape[0]} rows given")
    return sizes


def exchange_sizes(
    x: Tensor, send_sizes: Sequence[int] | None, recv_sizes: Sequence[int] | None, ranks: int
) -> tuple[Sequence[int], Sequence[int]]:
    """Return the numbers of rows that go to and come from each rank in an all_to_all of `x`."""
    if (send_sizes is None) != (recv_sizes is None):
        raise ValueError("all_to_all needs both send_sizes and recv_sizes, or neither")
    if send_sizes is None or recv_sizes is None:
        even = even_sizes(x, ranks)
        return even, even
    check_sizes("send_sizes", send_sizes, ranks)
    check_sizes("recv_sizes", recv_sizes, ranks)
    if sum(send_sizes) != x.shape[0]:
        raise ValueError(f"send_sizes {list(send_sizes)} do not add up to the {x.shape[0]} rows given")
    return send_sizes, recv_sizes


def resized(x: Tensor, dim: int, length: int) -> list[int]:
    """Return the shape of `x` with `length` at `dim`."""
    shape = list(x.shape)
    shape[dim] = length
    return shape


def check_out(out: Tensor, x: Tensor, shape: Sequence[int]) -> None:
    """ValueError unless `out` is contiguous, of that shape, and like `x` in dtype and device."""
    wanted = (list(shape), x.dtype, x.device)
    given = (list(out.shape), out.dtype, out.device)
    if wanted != given:
        raise ValueError(f"out must be of shape, dtype and device {wanted}, got {given}")
    check_contiguous(out)
