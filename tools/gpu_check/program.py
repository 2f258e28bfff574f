"""The layers of the demo model as a program, beside the same layers run operation by operation."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from collectives import LocalCommunicator
from enginecore import LLM, SamplingParams
from enginecore.config import EngineOptions
from enginecore.model_files import locate
from enginecore.worker.models.decoder import Decoder
from enginecore.worker.runner.program import StepLimits, layer_program
from enginecore.worker.weights.loading import load_decoder
from gpu_check.case import compare
from pagedattn import AttentionBatch, KVLayout, Program, allocate

BLOCK_SIZE = 16
# (sequences, tokens of each with its context): on a device the last have graphs for longer contexts.
SHAPES = ((1, 100), (3, 700), (16, 700), (61, 700), (256, 700), (5, 6000))
INTERPRETED = ((1, 20), (3, 20))
STEPS = 20
# Of float32 hidden states after 30 layers: products of another number of rows may be summed in another order.
TOLERANCE = 1e-3
PROMPTS = [f"Tell me a story about the number {number}." for number in range(12)]
# From a token that rounding changes on, an answer is another one; in float32 that is rare.
AGREEMENT = 0.9


def check_program(interpret: bool) -> dict[str, Any]:
    """Hidden states of decode steps and greedy answers in float32, and the time of a step in bfloat16.

    With CUDA graphs on a device; on a CPU the C kernels' program stands in for them.
    """
    device = torch.device("cpu" if interpret else "cuda:0")
    shapes = INTERPRETED if interpret else SHAPES
    checks = {
        f"{seqs} of {length} tokens": compare(step.by_program(), step.plain(), tolerance=TOLERANCE)
        for seqs, length, step in _steps(shapes, torch.float32, device)
    }
    checks["all steps"] = {"passed": len(checks) == len(shapes)}
    checks["greedy answers"] = _compare_answers(interpret)
    if interpret:
        return {"checks": checks}
    figures = {
        f"{seqs} of {length} tokens": _time(step)
        for seqs, length, step in _steps(shapes, torch.bfloat16, device)
    }
    return {"checks": checks, "figures": figures}


@torch.inference_mode()
def _steps(
    shapes: tuple[tuple[int, int], ...], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[int, int, _Step]]:
    """Yield decode steps of the demo model; none where its layers are no program, as the log says."""
    longest = max(length for _, length in shapes)
    model = load_decoder(
        locate("demo"), LocalCommunicator(), dtype=dtype, device=device, max_positions=longest
    )
    layout = KVLayout(len(model.layers), model.kv_heads, model.spec.head_dim, BLOCK_SIZE, dtype)
    blocks = max(seqs * -(-length // BLOCK_SIZE) for seqs, length in shapes)
    cache = allocate(layout, blocks, device).normal_()
    limits = StepLimits(2048, max(seqs for seqs, _ in shapes), longest)
    program = layer_program(model, cache, dtype, limits)
    if program is not None:
        for seqs, length in shapes:
            yield seqs, length, _Step(model, cache, program, seqs, length)


class _Step:
    """A decode step of `seqs` sequences of `length` tokens, in blocks of their own, run in either way.

    The keys and values that it stores are the same each time.
    """

    def __init__(self, model: Decoder, cache: Tensor, program: Program, seqs: int, length: int) -> None:
        self._model, self._cache, self._program = model, cache, program
        self._length = length
        blocks, device = -(-length // BLOCK_SIZE), cache.device
        self._table = torch.arange(seqs * blocks, dtype=torch.int32, device=device).view(seqs, blocks)
        self._ids = torch.arange(seqs, device=device) % 100 + 300
        self._positions = torch.full((seqs,), length - 1, device=device)

    @torch.inference_mode()
    def by_program(self) -> Tensor:
        return self._model.hidden(self._program(self._inputs(), self._batch()))

    @torch.inference_mode()
    def plain(self) -> Tensor:
        return self._model.hidden(self._model.run_layers(self._inputs(), self._cache, self._batch()))

    def _inputs(self) -> tuple[Tensor, ...]:
        return self._model.layer_inputs(self._ids, self._positions)

    def _batch(self) -> AttentionBatch:
        seqs, device, last = len(self._ids), self._ids.device, self._length - 1
        return AttentionBatch(
            query_starts=torch.arange(seqs + 1, dtype=torch.int32, device=device),
            lengths=torch.full((seqs,), self._length, dtype=torch.int32, device=device),
            block_table=self._table,
            slots=self._table[:, last // BLOCK_SIZE].long() * BLOCK_SIZE + last % BLOCK_SIZE,
            max_query=1,
            max_length=self._length,
            num_decodes=seqs,
        )


def _time(step: _Step) -> dict[str, float]:
    """Milliseconds a step, the host's work included, each the best of three."""
    graphed, plain = (min(_milliseconds(run) for _ in range(3)) for run in (step.by_program, step.plain))
    return {"graph_ms": round(graphed, 3), "plain_ms": round(plain, 3), "ratio": round(plain / graphed, 2)}


def _milliseconds(run: Callable[[], Tensor]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / STEPS * 1e3


def _compare_answers(interpret: bool) -> dict[str, Any]:
    """The share of tokens up to which greedy answers with a program and without are the same."""
    lines = _Lines()
    logger = logging.getLogger("enginecore")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        found, expected = (_answers(interpret, eager) for eager in (False, True))
    finally:
        logger.removeHandler(lines)
    same = sum(_common_prefix(one, other) for one, other in zip(found, expected))
    agreement = same / sum(map(len, expected))
    used = [line for line in lines.found if "CUDA graphs" in line or "are one program" in line]
    return {
        "passed": agreement >= (1.0 if interpret else AGREEMENT) and len(used) == 1,
        "agreement": round(agreement, 3),
        "log": used or lines.found,
    }


def _answers(interpret: bool, eager: bool) -> list[list[int]]:
    options: EngineOptions = {
        "max_model_len": 256,
        "device": "cpu" if interpret else "cuda",
        "dtype": "float32",
        "enforce_eager": eager,
        "num_blocks_override": 256,
    }
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=8 if interpret else 64)
    llm = LLM("demo", **options)
    try:
        results = llm.generate(PROMPTS[:2] if interpret else PROMPTS, params)
        return [list(result.outputs[0].token_ids) for result in results]
    finally:
        llm.shutdown()


def _common_prefix(one: list[int], other: list[int]) -> int:
    return next((index for index, (a, b) in enumerate(zip(one, other)) if a != b), len(other))


class _Lines(logging.Handler):
    """Collects lines of the log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())
