"""One of the processes that conftest.py starts: runs every check, and stops at the first that fails.

usage: rank_process.py RANK WORLD FOLDER MODULE...
"""

import importlib.util
import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from collectives import Communicator, GlooCommunicator, Grid, SharedMemoryCommunicator

Check = Callable[[Communicator], None]


def checks(path: str) -> dict[str, Check]:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: check for name, check in vars(module).items() if name.startswith("ranks_")}


def joined(store: dist.Store, ranks: range, rank: int) -> SharedMemoryCommunicator:
    comm = SharedMemoryCommunicator.join(
        store, ranks.index(rank), len(ranks), name=f"{ranks.start} to {ranks.stop}", timeout=60
    )
    assert comm is not None, "the memory of rank 0 is out of reach"
    return comm


def main(rank: int, world: int, folder: Path, paths: list[str]) -> None:
    torch.set_num_threads(1)
    found = [named for path in paths for named in checks(path).items()]
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    half, _ = dist.new_subgroups_by_enumeration(Grid(dp=2, tp=world // 2).groups("tp"))
    three = dist.new_group([1, 2, 3])
    first = rank // (world // 2) * (world // 2)
    gloo = [GlooCommunicator(half), GlooCommunicator()]
    shared = [joined(store, range(first, first + world // 2), rank), joined(store, range(world), rank)]
    if rank > 0:
        gloo.insert(1, GlooCommunicator(three))
        shared.insert(1, joined(store, range(1, world), rank))
    passed: list[str] = []
    try:
        for kind, communicators in (("gloo", gloo), ("shared_memory", shared)):
            for comm in communicators:
                for name, check in found:
                    if not name.startswith("ranks_shared_memory" if kind == "gloo" else "ranks_gloo"):
                        check(comm)
                        passed.append(f"{name}[{kind} {comm.size}]")
    finally:
        (folder / f"{rank}.json").write_text(json.dumps(passed))
    for comm in shared:
        comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
