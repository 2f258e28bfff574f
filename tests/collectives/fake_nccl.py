"""The library of fake_nccl.c: compiled, listened to, and played by threads that stand for ranks."""

import ctypes
import queue
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import torch

HERE = Path(__file__).parent
STREAM = 0x7FAB00000010  # more than 32 bits, as addresses of streams have
COMM = 0x7FEE00001000  # plus the rank; see fake_nccl.c
LIMIT_S = 30

Arguments = tuple[int | str, ...]


def compile_library(folder: Path, header: Path, *flags: str) -> Path:
    """Compile fake_nccl.c against the `nccl.h` in `header`, with no CUDA but its name for a stream."""
    (folder / "cuda_runtime.h").write_text("typedef struct CUstream_st *cudaStream_t;\n")
    (folder / "cuda_fp16.h").touch()
    target = folder / f"libfake{''.join(flags)}.so"
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", f"-I{folder}", f"-I{header}", *flags]
    subprocess.run([*command, "-o", str(target), str(HERE / "fake_nccl.c")], check=True, timeout=60)
    return target


class Listener:
    """Hands each call that reaches the library to `on_call(name, arguments)`, which returns NCCL's result."""

    def __init__(self, path: Path, on_call: Callable[[str, Arguments], int]) -> None:
        def hear(line: bytes) -> int:
            name, *words = line.decode().split()
            return on_call(name, tuple(int(w) if w.isdecimal() else w for w in words))

        self._hear = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)(hear)  # kept for as long as it is called
        self._library = ctypes.CDLL(str(path))
        self._library.fake_listen(self._hear)

    def close(self) -> None:
        self._library.fake_listen(None)


class Player:
    """Does on ordinary memory what NCCL would do on a device's, among threads that are the ranks.

    What NCCL's documentation says of each call is all that it relies on: rooted calls read and write only
    where the root or everybody must have memory, and calls between GroupStart and GroupEnd take effect at the
    end, sends before receives.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._barrier = threading.Barrier(size, timeout=LIMIT_S)
        self._given: list[torch.Tensor] = [torch.empty(0)] * size
        self._mail = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
        self._local = threading.local()

    def __call__(self, name: str, arguments: Arguments) -> int:
        pending = getattr(self._local, "pending", None)
        if name == "ncclGroupStart":
            assert pending is None
            self._local.pending = []
        elif name == "ncclGroupEnd":
            self._local.pending = None
            for call in sorted(pending, key=lambda call: call[0] == "ncclRecv"):
                self._play(*call)
        elif name.startswith(("ncclComm", "ncclGet")):
            pass
        elif pending is not None:
            pending.append((name, arguments))
        else:
            self._play(name, arguments)
        return 0

    def abort(self) -> None:
        """Let the other threads fail instead of waiting for one that did."""
        self._barrier.abort()

    def _play(self, name: str, arguments: Arguments) -> None:
        *arguments, comm, stream = arguments
        rank = comm - COMM
        assert 0 <= rank < self._size and stream == STREAM
        match name, arguments:
            case "ncclSend", (source, count, dtype, peer):
                self._mail[rank, peer].put(_at(source, count, dtype).clone())
            case "ncclRecv", (target, count, dtype, peer):
                sent = self._mail[peer, rank].get(timeout=LIMIT_S)
                assert sent.numel() == count
                _at(target, count, dtype).copy_(sent)
            case "ncclAllReduce", (source, target, count, dtype, op):
                everyones = self._exchange(rank, _at(source, count, dtype))
                _at(target, count, dtype).copy_(_reduced(everyones, op))
            case "ncclReduce", (source, target, count, dtype, op, root):
                everyones = self._exchange(rank, _at(source, count, dtype))
                if rank == root:
                    _at(target, count, dtype).copy_(_reduced(everyones, op))
            case "ncclReduceScatter", (source, target, count, dtype, op):
                everyones = self._exchange(rank, _at(source, count * self._size, dtype))
                mine = slice(rank * count, (rank + 1) * count)
                _at(target, count, dtype).copy_(_reduced([x[mine] for x in everyones], op))
            case "ncclAllGather", (source, target, count, dtype):
                everyones = self._exchange(rank, _at(source, count, dtype))
                _at(target, count * self._size, dtype).copy_(torch.cat(everyones))
            case "ncclBroadcast", (source, target, count, dtype, root):
                given = _at(source, count, dtype) if rank == root else torch.empty(0)
                _at(target, count, dtype).copy_(self._exchange(rank, given)[root])
            case _:
                raise AssertionError(f"unexpected {name} {arguments}")

    def _exchange(self, rank: int, given: torch.Tensor) -> list[torch.Tensor]:
        self._given[rank] = given.clone()
        self._barrier.wait()
        everyones = list(self._given)
        self._barrier.wait()
        return everyones


def _at(address: int, count: int, dtype: str) -> torch.Tensor:
    kind = getattr(torch, dtype)
    memory = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=kind)


def _reduced(everyones: list[torch.Tensor], op: str) -> torch.Tensor:
    stacked = torch.stack(everyones)
    return {"sum": lambda: stacked.sum(0), "max": lambda: stacked.amax(0), "min": lambda: stacked.amin(0)}[
        op
    ]()
