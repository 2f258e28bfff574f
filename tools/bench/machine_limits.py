"""Rates of memory reads and multiply-adds, measured by machine_limits.c, to compare kernels with."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import tempfile
from functools import cache
from pathlib import Path

# Enough that no cache holds it.
BUFFER_BYTES = 256 << 20
CHAINS, LANES = 12, 16  # of machine_limits.c


@cache
def compile_limits() -> ctypes.CDLL:
    """The functions of machine_limits.c; OpenMP's runtime is that of the process."""
    source = Path(__file__).with_suffix(".c")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "limits.so"
        flags = ["-O3", "-march=native", "-ffast-math", "-fopenmp", "-shared", "-fPIC"]
        subprocess.run(["cc", *flags, source, "-o", library], check=True)
        limits = ctypes.CDLL(str(library))
    for function in (limits.read_all, limits.read_blocks, limits.multiply_add):
        function.restype = ctypes.c_float
    return limits


class Reads:
    """Reads of one large buffer, in huge pages where the system has them."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._memory = mmap.mmap(-1, BUFFER_BYTES, mmap.MAP_PRIVATE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._floats = (ctypes.c_float * (BUFFER_BYTES // 4)).from_buffer(self._memory)
        ctypes.memset(self._floats, 0, BUFFER_BYTES)

    def __call__(self) -> None:
        compile_limits().read_all(self._floats, ctypes.c_long(BUFFER_BYTES // 4), self.threads)


class MultiplyAdds:
    """Multiply-adds of registers on each thread."""

    rounds = 2_000_000

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.operations = 2 * self.rounds * CHAINS * LANES * threads

    def __call__(self) -> None:
        compile_limits().multiply_add(ctypes.c_long(self.rounds), self.threads)
