"""Run a loaded decoder over one sequence: a prefill, then a token at a time."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collectives import Communicator, LocalCommunicator
from enginecore.model_files import locate
from enginecore.worker.models.decoder import Decoder
from enginecore.worker.runner.program import StepLimits, layer_program
from enginecore.worker.weights.loading import load_decoder
from pagedattn import AttentionBatch, KVLayout, Program, allocate, build_batch

BLOCK_TABLE = [2, 0, 3, 1]
"""Blocks of 16 tokens."""


def load(path: Path, comm: Communicator | None = None, **options: Any) -> Decoder:
    """Load the model of `path` on the CPU, in float32 if `options` do not say otherwise."""
    defaults = {"dtype": torch.float32, "device": torch.device("cpu"), "max_positions": 512}
    return load_decoder(locate(str(path)), comm or LocalCommunicator(), **(defaults | options))


@torch.inference_mode()
def run_stages(stages: Sequence[Decoder], ids: Sequence[int], prefill: int) -> Tensor:
    """Return logits [len(ids), vocab] of one sequence: `prefill` tokens at once, the rest one by one."""
    caches = [_cache(stage) for stage in stages]
    logits = []
    for x, positions, batch in _steps(ids, prefill):
        for stage, cache in zip(stages, caches, strict=True):
            x = stage(x, positions, cache, batch)
        logits.append(stages[-1].logits(x))
    return torch.cat(logits)


@torch.inference_mode()
def run_program(model: Decoder, ids: Sequence[int], prefill: int) -> tuple[Tensor, Program]:
    """Do as `run_stages` with the one program of the model's layers, and return that too."""
    cache = _cache(model)
    program = layer_program(model, cache, cache.dtype, StepLimits(prefill, 1, 64))
    assert program is not None
    logits = []
    for x, positions, batch in _steps(ids, prefill):
        hidden = model.hidden(program(model.layer_inputs(x, positions), batch))
        logits.append(model.logits(hidden))
    return torch.cat(logits), program


def _steps(ids: Sequence[int], prefill: int) -> Iterator[tuple[Tensor, Tensor, AttentionBatch]]:
    for start, stop in [(0, prefill), *((i, i + 1) for i in range(prefill, len(ids)))]:
        batch = build_batch([stop - start], [stop], [BLOCK_TABLE], block_size=16)
        yield torch.tensor(ids[start:stop], dtype=torch.int64), torch.arange(start, stop), batch


def _cache(stage: Decoder) -> Tensor:
    dtype = stage.layers[0].attention.qkv.weight.dtype
    layout = KVLayout(len(stage.held), stage.kv_heads, stage.spec.head_dim, 16, dtype)
    return allocate(layout, len(BLOCK_TABLE))
