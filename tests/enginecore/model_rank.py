"""One of the processes that test_model_parallel.py starts: runs its share of every model in a folder.

usage: model_rank.py RANK WORLD FOLDER

FOLDER/cases.json has for each case the checkpoint, how it is spread, and the ids of each rank's sequence.
"""

import json
import math
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from collectives import ExpertPlacement, GlooCommunicator, LocalCommunicator
from enginecore.worker.models.experts import SparseFeedForward
from model_steps import load, run_program, run_stages


def expert_weights(model):
    mlps = [layer.mlp for layer in model.layers]
    return [weight for mlp in mlps if isinstance(mlp, SparseFeedForward) for weight in mlp.experts.packed]


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=20))
    everyone = GlooCommunicator()
    found = {}
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        experts = {}
        if case["experts"] is not None:
            ranks = tuple(tuple(held) for held in case["experts"])
            experts = {"ep": everyone, "placements": (ExpertPlacement(case["num_experts"], ranks),)}
        tp = everyone if case["tp"] == world else LocalCommunicator()
        model = load(folder / case["model"], tp, **experts)
        logits = run_stages([model], case["ids"][rank], prefill=20)
        loads = model.expert_loads()
        recorded, program = run_program(model, case["ids"][rank], prefill=20)
        found[name] = {
            "logits": logits,
            "loads": loads,
            "recorded": recorded,
            "host_calls": program.num_host_calls,
            "kv_heads": model.kv_heads,
            "elements": sum(math.prod(weight.shape) for weight in expert_weights(model)),
        }
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
