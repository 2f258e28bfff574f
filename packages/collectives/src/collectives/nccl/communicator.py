"""A communicator over NCCL by ctypes, in stream order."""

import ctypes
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.arguments import check_rank, resized
from collectives.communicator import CheckedCommunicator, ReduceOp
from collectives.deadline import call_within
from collectives.nccl.library import BYTES, DTYPES, OPS, NcclLibrary, UniqueId, default_library


class NcclCommunicator(CheckedCommunicator):
    """Ranks that each hold one CUDA device, over NCCL.

    Every operation but `barrier` is enqueued on the current stream of the device and returns at once: the
    host waits for nothing, memory comes from torch's allocator only, and the calls can be captured in a CUDA
    graph. Data that is only moved travels as bytes, whatever its dtype; reductions are done in the tensor's
    own dtype (fp8 where NCCL and the device can). Uneven pieces go as one group of point-to-point or rooted
    operations, and empty ones not at all.

    Calls raise NcclError when NCCL refuses them. A rank that is lost later shows in `check`; operations in
    flight then end only with `abort`. ValueError also for tensors of another device, TypeError for a dtype
    that cannot be reduced.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        device: torch.device,
        name: str,
        timeout: float,
        library: NcclLibrary | None = None,
    ) -> None:
        """Join `size` ranks, each calling this with the same `name`, which is used once in a `store`.

        Rank 0 leaves an id in the store, and the others wait for it; then all wait for each other, each for
        at most `timeout` seconds: TimeoutError.
        """
        check_rank(rank, size)
        self.rank = rank
        self.size = size
        self.device = device
        self._name = name
        self._library = library or default_library()
        unique_id = self._exchange_id(store, timeout)
        what = f"rank {rank} joining the {size} ranks of NCCL group {name!r}"
        self._comm: ctypes.c_void_p | None = call_within(timeout, what, lambda: self._join(unique_id))
        self._token = torch.zeros(1, device=device)

    def barrier(self) -> None:
        """Wait until every rank has called it and the work before it on this stream is done."""
        self.all_reduce(self._token)
        _wait_for_stream(self.device)

    def check(self) -> None:
        """Raise NcclError for an asynchronous error, such as a lost rank. May be called at any time."""
        code = ctypes.c_int()
        self._library.call("ncclCommGetAsyncError", self._open(), ctypes.byref(code), comm=self._comm)
        if code.value:
            raise self._library.error(f"NCCL group {self._name!r}", code.value, self._comm)

    def close(self) -> None:
        """Complete the enqueued operations and leave the group. When a rank is lost, `abort` instead."""
        self._leave("ncclCommDestroy")

    def abort(self) -> None:
        """Stop the operations in flight and leave the group. May be called from another thread."""
        self._leave("ncclCommAbort")

    def _all_reduce(self, x: Tensor, op: ReduceOp) -> None:
        kind = _dtype(x), OPS[op]
        if x.numel():
            self._enqueue("ncclAllReduce", x, x.data_ptr(), x.data_ptr(), x.numel(), *kind)

    def _all_gather(self, x: Tensor, dim: int, sizes: Sequence[int], out: Tensor | None) -> Tensor:
        piece = x.contiguous()
        shapes = [resized(x, dim, n) for n in sizes]
        elements = [torch.Size(shape).numel() for shape in shapes]
        gathered = out if dim == 0 and out is not None else x.new_empty(sum(elements))
        self._gather_pieces(piece, gathered, [n * x.itemsize for n in elements])
        if dim == 0:
            return gathered.view(resized(x, dim, sum(sizes))) if out is None else out
        pieces = gathered.split(elements)
        return torch.cat([piece.view(shape) for piece, shape in zip(pieces, shapes)], dim, out=out)

    def _reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        kind = _dtype(x), OPS["sum"]
        x = x.contiguous()
        mine = x.new_empty(sizes[self.rank], *x.shape[1:])
        width = x[:1].numel()
        if not width:
            return mine
        if min(sizes) == max(sizes):
            if mine.numel():
                self._enqueue("ncclReduceScatter", x, x.data_ptr(), mine.data_ptr(), mine.numel(), *kind)
            return mine
        with self._grouped():
            for root, (start, rows) in enumerate(zip(_starts(sizes), sizes)):
                if rows:
                    source = x.data_ptr() + start * width * x.itemsize
                    self._enqueue("ncclReduce", x, source, mine.data_ptr(), rows * width, *kind, root)
        return mine

    def _broadcast(self, x: Tensor, src: int) -> None:
        if x.numel():
            self._enqueue("ncclBroadcast", x, x.data_ptr(), x.data_ptr(), x.nbytes, BYTES, src)

    def _all_to_all(self, x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Tensor:
        x = x.contiguous()
        received = x.new_empty(sum(recv_sizes), *x.shape[1:])
        row = x.itemsize * torch.Size(x.shape[1:]).numel()
        with self._grouped():
            for peer, (start, rows) in enumerate(zip(_starts(send_sizes), send_sizes)):
                if rows * row:
                    self._enqueue("ncclSend", x, x.data_ptr() + start * row, rows * row, BYTES, peer)
            for peer, (start, rows) in enumerate(zip(_starts(recv_sizes), recv_sizes)):
                if rows * row:
                    self._enqueue("ncclRecv", x, received.data_ptr() + start * row, rows * row, BYTES, peer)
        return received

    def _send(self, x: Tensor, dst: int) -> None:
        if x.numel():
            self._enqueue("ncclSend", x, x.data_ptr(), x.nbytes, BYTES, dst)

    def _recv(self, x: Tensor, src: int) -> None:
        if x.numel():
            self._enqueue("ncclRecv", x, x.data_ptr(), x.nbytes, BYTES, src)

    def _exchange_id(self, store: dist.Store, timeout: float) -> bytes:
        key = f"nccl/{self._name}"
        if self.rank == 0:
            unique_id = self._library.unique_id()
            store.set(key, unique_id.hex())
            return unique_id
        try:
            store.wait([key], timedelta(seconds=timeout))
        except dist.DistError as error:
            raise TimeoutError(
                f"rank 0 of NCCL group {self._name!r} left no id for rank {self.rank} within {timeout:g} s"
            ) from error
        return bytes.fromhex(store.get(key).decode())

    def _join(self, unique_id: bytes) -> ctypes.c_void_p:
        _use_device(self.device)
        comm = ctypes.c_void_p()
        self._library.call(
            "ncclCommInitRank",
            ctypes.byref(comm),
            self.size,
            UniqueId.from_buffer_copy(unique_id),
            self.rank,
        )
        return comm

    def _gather_pieces(self, piece: Tensor, gathered: Tensor, nbytes: Sequence[int]) -> None:
        """Gather each rank's piece, of `nbytes[rank]`, one after another into `gathered`."""
        if min(nbytes) == max(nbytes):
            if piece.numel():
                addresses = piece.data_ptr(), gathered.data_ptr()
                self._enqueue("ncclAllGather", piece, *addresses, piece.nbytes, BYTES)
            return
        with self._grouped():
            for root, (start, count) in enumerate(zip(_starts(nbytes), nbytes)):
                if count:
                    addresses = piece.data_ptr(), gathered.data_ptr() + start
                    self._enqueue("ncclBroadcast", piece, *addresses, count, BYTES, root)

    def _enqueue(self, name: str, x: Tensor, *arguments: int) -> None:
        self._library.call(name, *arguments, self._open(), _stream_of(x), comm=self._comm)

    @contextmanager
    def _grouped(self) -> Generator[None, None, None]:
        """Group calls, which NCCL then starts together, so that their order cannot deadlock."""
        self._library.call("ncclGroupStart")
        try:
            yield
        finally:
            self._library.call("ncclGroupEnd", comm=self._comm)

    def _leave(self, how: str) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            self._library.call(how, comm)

    def _open(self) -> ctypes.c_void_p:
        if self._comm is None:
            raise ValueError(f"NCCL group {self._name!r} is closed")
        return self._comm

    def _check(self, x: Tensor) -> None:
        if x.device != self.device:
            raise ValueError(f"NCCL group {self._name!r} is on {self.device}, the tensor on {x.device}")


def _stream_of(x: Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream


def _use_device(device: torch.device) -> None:
    torch.cuda.set_device(device)


def _wait_for_stream(device: torch.device) -> None:
    torch.cuda.current_stream(device).synchronize()


def _starts(lengths: Sequence[int]) -> Iterator[int]:
    return accumulate(lengths[:-1], initial=0)


def _dtype(x: Tensor) -> int:
    if x.dtype not in DTYPES:
        raise TypeError(f"NCCL cannot reduce {x.dtype}")
    return DTYPES[x.dtype]
