"""Time a sum over ranks on this host, through shared memory and over gloo, side by side.

    uv run python tools/bench/all_reduce.py [RANKS]

Each rank runs one thread. Sizes take turns between the two, and the median of each is told in µs.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from collectives import SharedMemoryCommunicator

SIZES = (576, 1 << 14, 1 << 18, 1 << 22)
"""Elements, float32."""


def main(ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, str(ranks), str(Path(folder, "store"))]
        others = [subprocess.Popen([*command, str(rank)]) for rank in range(1, ranks)]
        try:
            run(ranks, command[-1], 0)
        finally:
            for other in others:
                other.wait(30)


def run(ranks: int, store_file: str, rank: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(store_file, ranks)
    shared = SharedMemoryCommunicator.join(store, rank, ranks, name="all", timeout=60)
    assert shared is not None
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    for size in SIZES:
        x = torch.ones(size)
        repeats = 200 if size < 1 << 20 else 20
        of_shared = median(lambda x=x: shared.all_reduce(x.fill_(1)), repeats)
        of_gloo = median(lambda x=x: dist.all_reduce(x.fill_(1)), repeats)
        if rank == 0:
            print(f"{4 * size / 1024:8.1f} KiB: shared memory {of_shared:6.0f} µs, gloo {of_gloo:6.0f} µs")
    dist.destroy_process_group()
    shared.close()


def median(call: Callable[[], object], repeats: int) -> float:
    """Microseconds of a call."""
    times = []
    for _ in range(repeats + 10):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times[10:])


if __name__ == "__main__":
    if len(sys.argv) > 3:
        run(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
