"""A communicator over shared memory, for ranks on one host."""

import math
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.arguments import resized
from collectives.communicator import CheckedCommunicator, ReduceOp
from collectives.sharding import shard
from collectives.shared_group import CHUNK, SharedGroup, allocate

_HALVES = frozenset({torch.float16, torch.bfloat16})
_OPS: dict[ReduceOp, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_CUT = 1 << 14
"""Elements from which three or more ranks each reduce a part (reduce-scatter and all-gather)."""


class SharedMemoryCommunicator(CheckedCommunicator):
    """CPU tensors among the ranks of one host: each writes once, the others read. Linux only.

    Sums are in the order of the ranks, those of float16 and bfloat16 in float32 and rounded once, so they
    have the same bits on every rank and in every run. When a rank ends, closes its communicator or does not
    arrive within the timeout, those that wait for it raise RankLost, and can use theirs no more.
    Tensors of more than `CHUNK` bytes go piece by piece. One thread at a time.

    TypeError for tensors that are not on the CPU, or of a dtype that cannot be added.
    """

    def __init__(self, group: SharedGroup) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group

    @classmethod
    def join(
        cls, store: dist.Store, rank: int, size: int, *, name: str, timeout: float
    ) -> "SharedMemoryCommunicator | None":
        """Make the communicator together with the other ranks that share `store`, or return None on all.

        None means that some rank cannot open the memory of rank 0: they are on several hosts, in separate
        containers, or of different users. `name` distinguishes the group from others in the store.
        `timeout` is in seconds, for this call and then for each wait.

        Raises dist.DistError when a rank does not come in time.
        """
        limit = timedelta(seconds=timeout)
        keys = [f"shared/{name}/{other}" for other in range(size)]
        descriptor = allocate(size) if rank == 0 and sys.platform == "linux" else None
        if rank == 0:
            store.set(f"shared/{name}", "" if descriptor is None else f"/proc/{os.getpid()}/fd/{descriptor}")
            store.set(f"shared/{name}/host", _host())
        try:
            store.wait([f"shared/{name}", f"shared/{name}/host"], limit)
            if rank != 0:
                descriptor = _opened(store.get(f"shared/{name}").decode(), store.get(f"shared/{name}/host"))
            group = None if descriptor is None else SharedGroup(descriptor, rank, size, timeout)
            store.set(keys[rank], "" if group is None else "joined")
            store.wait(keys, limit)  # from here on rank 0 may close its descriptor
        finally:
            if descriptor is not None:
                os.close(descriptor)
        if group is not None and all(store.get(key) for key in keys):
            group.watch()
            return cls(group)
        if group is not None:
            group.close()
        return None

    def barrier(self) -> None:
        self._group.meet()

    def close(self) -> None:
        """Leave the group. Ranks that still wait for this one get RankLost."""
        self._group.close()

    def _check(self, x: Tensor) -> None:
        if x.device.type != "cpu":
            raise TypeError(f"shared memory carries tensors of the CPU, not of {x.device}")

    def _all_reduce(self, x: Tensor, op: ReduceOp) -> None:
        if x.dtype.itemsize == 1 and x.is_floating_point():
            raise TypeError(f"{x.dtype} cannot be reduced; convert it to float16 or float32")
        for piece in x.view(-1).split(CHUNK // x.element_size()):
            if self.size > 2 and len(piece) >= _CUT:
                self._reduce_cut(piece, op)
            elif len(piece):
                _combine(self._exchange(piece, [len(piece)] * self.size), op, piece)

    def _all_gather(self, x: Tensor, dim: int, sizes: Sequence[int], out: Tensor | None) -> Tensor:
        shapes = [resized(x, dim, n) for n in sizes]
        pieces = self._gather(x.contiguous().view(-1), [math.prod(shape) for shape in shapes])
        return torch.cat([piece.view(shape) for piece, shape in zip(pieces, shapes)], dim, out=out)

    def _reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        mine = sizes[self.rank]
        pieces = self._all_to_all(x, sizes, [mine] * self.size)
        return pieces.view(self.size, mine, *x.shape[1:]).sum(0, dtype=x.dtype)

    def _broadcast(self, x: Tensor, src: int) -> None:
        for piece in x.view(-1).split(CHUNK // x.element_size()):
            lengths = [0] * self.size
            lengths[src] = len(piece)
            given = self._exchange(piece[: lengths[self.rank]], lengths)[src] if len(piece) else piece
            if self.rank != src:
                piece.copy_(given)

    def _all_to_all(self, x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Tensor:
        received = x.new_empty(sum(recv_sizes), *x.shape[1:])
        row = math.prod(x.shape[1:]) * x.element_size()
        outgoing = _bytes(x.contiguous()).split([n * row for n in send_sizes])
        incoming = _bytes(received).split([n * row for n in recv_sizes])
        incoming[self.rank].copy_(outgoing[self.rank])
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        # In step with each other, chunk by chunk, so that no rank waits for room while another waits for it.
        for start in range(0, max(map(len, outgoing + incoming)), CHUNK):
            for other in others:
                if start < len(outgoing[other]):
                    self._group.put(other, outgoing[other][start : start + CHUNK])
            for other in others:
                if start < len(incoming[other]):
                    self._group.take(other, incoming[other][start : start + CHUNK])
        return received

    def _send(self, x: Tensor, dst: int) -> None:
        data = _bytes(x)
        for start in range(0, len(data), CHUNK):
            self._group.put(dst, data[start : start + CHUNK])

    def _recv(self, x: Tensor, src: int) -> None:
        data = _bytes(x)
        for start in range(0, len(data), CHUNK):
            self._group.take(src, data[start : start + CHUNK])

    def _exchange(self, piece: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Write `piece` [lengths[rank]], at most CHUNK bytes; return every rank's, valid until the next."""
        slots = self._group.slots(piece.dtype)
        slots[self.rank][: len(piece)].copy_(piece)
        self._group.meet()
        return [slot[:length] for slot, length in zip(slots, lengths)]

    def _gather(self, flat: Tensor, lengths: Sequence[int]) -> Sequence[Tensor]:
        """Return every rank's flat tensor, valid until the next call."""
        step = CHUNK // flat.element_size()
        if max(lengths) <= step:
            return self._exchange(flat, lengths) if any(lengths) else [flat] * self.size
        gathered = flat.new_empty(sum(lengths)).split(list(lengths))
        for start in range(0, max(lengths), step):
            pieces = [whole[start : start + step] for whole in gathered]
            given = self._exchange(flat[start : start + step], [len(piece) for piece in pieces])
            for piece, theirs in zip(pieces, given):
                piece.copy_(theirs)
        return gathered

    def _reduce_cut(self, piece: Tensor, op: ReduceOp) -> None:
        """Reduce `piece` in place: each rank reduces a part, and gathers the others."""
        parts = piece.split([shard(len(piece), self.size, rank).size for rank in range(self.size)])
        mine = shard(len(piece), self.size, self.rank)
        everyones = self._exchange(piece, [len(piece)] * self.size)
        _combine([theirs[mine.start : mine.stop] for theirs in everyones], op, parts[self.rank])
        reduced = self._exchange(parts[self.rank], [len(part) for part in parts])
        for part, theirs in zip(parts, reduced):
            part.copy_(theirs)


def _combine(pieces: Sequence[Tensor], op: ReduceOp, out: Tensor) -> None:
    """Reduce the pieces of all ranks, in order, into `out`, which is none of them."""
    combine = _OPS[op]
    if op == "sum" and out.dtype in _HALVES:
        total = pieces[0].float()
        for piece in pieces[1:]:
            total += piece
        out.copy_(total)
        return
    combine(pieces[0], pieces[1], out=out)
    for piece in pieces[2:]:
        combine(out, piece, out=out)


def _bytes(x: Tensor) -> Tensor:
    """Return a contiguous tensor as [bytes] uint8."""
    return x.view(-1).view(torch.uint8)


def _host() -> str:
    """Return an id of this host and of the namespaces of processes and network of this process."""
    names = [Path(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
    boot = Path("/proc/sys/kernel/random/boot_id")
    return (
        " ".join([boot.read_text().strip(), *(str(name.readlink()) for name in names)])
        if boot.exists()
        else ""
    )


def _opened(path: str, host: bytes) -> int | None:
    """Open rank 0's memory; None where it cannot be reached."""
    if not path or host.decode() != _host():
        return None
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
