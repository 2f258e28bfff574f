"""Tasks, one a record, and their order."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from compare.peers import PEERS
from compare.workloads import FULL, SHORT, WORKLOADS, Size

MAX_NUM_SEQS, MAX_MODEL_LEN, MAX_BATCHED_TOKENS = 64, 1024, 2048
"""Settings of every engine that has them."""
CACHE_GIB = 4


@dataclass(frozen=True)
class Task:
    """One measurement of one engine."""

    peer: str
    model: str
    dtype: str
    workload: str
    round: int
    threads: int
    folder: str
    """Where `setup` has put environments and models."""
    short: bool = False

    @property
    def size(self) -> Size:
        return SHORT if self.short else FULL

    @property
    def torch_dtype(self) -> str:
        return {"bf16": "bfloat16", "fp32": "float32"}[self.dtype]

    @property
    def checkpoint(self) -> Path:
        """The folder with safetensors; they hold bfloat16, which float32 has exactly."""
        return checkpoint_folder(Path(self.folder), self.model)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def checkpoint_folder(folder: Path, model: str) -> Path:
    """The folder of a model's config.json, tokenizer and safetensors."""
    return folder / "models" / model


def gguf_file(folder: Path, model: str, dtype: str) -> Path:
    """A model's GGUF file with matrices in bf16, f16 or f32."""
    return folder / "models" / f"{model}-{dtype}.gguf"


def openvino_folder(folder: Path, model: str) -> Path:
    """The folder of a model as OpenVINO's graph."""
    return folder / "models" / f"{model}-openvino"


def plan(
    peers: Sequence[str],
    models: Sequence[str],
    dtypes: Sequence[str],
    workloads: Sequence[str],
    rounds: int,
    *,
    threads: int,
    folder: str,
    short: bool = False,
) -> list[Task]:
    """Return the records to make: in each round all engines in turn on a workload, then on the next.

    Each round begins with another engine. Workloads that an engine cannot run are left out.
    """
    tasks = []
    for number in range(rounds):
        first = number % max(len(peers), 1)
        for model in models:
            for dtype in dtypes:
                for workload in workloads:
                    tasks += [
                        Task(peer, model, dtype, workload, number, threads, folder, short)
                        for peer in [*peers[first:], *peers[:first]]
                        if PEERS[peer].can_run(WORKLOADS[workload])
                    ]
    return tasks
