"""Time a step's scheduling and block bookkeeping, without a model.

    uv run python tools/bench/scheduler.py [--steps 300] [--json PATH]

Times `plan` and `commit` on paged memory with prefix caching and blocks of 16 tokens: steps in which 64, 256
or 1,024 rows each decode a token, and steps in which 256 rows decode and 8 prompts of 1,024 tokens come in.
Then the hashing of 50,000 prompt tokens, and allocating and releasing 4,096 blocks in one call each. Every
figure is a median, on one thread.

Where vLLM is installed, its own scheduler takes decode steps of the same shape, up to 60 of them, and its
figures are printed next to ours.
"""

import argparse
import importlib.util
import json
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import vllm_scheduler
from numpy.typing import NDArray

from batchsched import Limits, Request, Scheduler, StepPlan, StepResult
from kvblocks import BlockPool, PagedMemory, PrefixHasher

BLOCK_SIZE = 16
PROMPT = 512
"""Tokens of the prompts that decode, give or take a block, so that in every step some cross a boundary."""
PREFILLS, PREFILL = 8, 1024
STOP = 2


class Figures(NamedTuple):
    """Medians."""

    decode_step_ms: dict[str, float]
    mixed_step_ms: float
    hash_50k_ms: float
    alloc_release_ns: float
    """A block."""


class Decoding:
    """A scheduler with `rows` rows that all decode, for at least `steps` steps."""

    def __init__(self, rows: int, steps: int, *, spare: int = 0) -> None:
        self._rng = np.random.default_rng(0)
        self._handle = 0
        # Steps are also spent on letting the rows in, some 16 prompts at a time.
        max_tokens = steps + rows // 8
        length = PROMPT + BLOCK_SIZE + max_tokens
        blocks = 1 + length // BLOCK_SIZE
        memory = PagedMemory(
            num_blocks=rows * (blocks + 1) + 2 * spare * PREFILL // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            max_rows=rows + spare,
            max_blocks_per_row=blocks + PREFILL // BLOCK_SIZE,
        )
        limits = Limits(
            max_num_seqs=rows + spare,
            max_num_batched_tokens=rows + PREFILLS * PREFILL,
            max_model_len=length + PREFILL,
        )
        self._scheduler = Scheduler(limits, memory)
        for row in range(rows):
            self.add(PROMPT + row % BLOCK_SIZE, max_tokens)
        while self.step()[1].num_tokens != rows:
            pass

    def add(self, prompt: int, max_tokens: int) -> None:
        tokens = self._rng.integers(STOP + 1, 32000, prompt).astype(np.int32)
        self._scheduler.add(Request(self._handle, tokens, max_tokens, stop_ids=(STOP,)))
        self._handle += 1

    def step(self) -> tuple[float, StepPlan]:
        """Plan and commit a step. Returns the milliseconds it took, and the plan."""
        begin = time.perf_counter()
        plan = self._scheduler.plan()
        planned = time.perf_counter()
        result = StepResult(plan.step, self._sampled(int(plan.samples.sum())))
        sampled = time.perf_counter()
        self._scheduler.commit(result)
        return 1e3 * (time.perf_counter() - sampled + planned - begin), plan

    def _sampled(self, count: int) -> NDArray[np.int32]:
        return self._rng.integers(STOP + 1, 32000, count).astype(np.int32)


def decode_step_ms(rows: int, steps: int) -> float:
    decoding = Decoding(rows, steps)
    taken = []
    for _ in range(steps - 1):
        milliseconds, plan = decoding.step()
        assert plan.num_tokens == rows
        taken.append(milliseconds)
    return statistics.median(taken)


def mixed_step_ms(rows: int, steps: int) -> float:
    decoding = Decoding(rows, steps, spare=PREFILLS)
    taken = []
    for _ in range(min(steps - 1, 100)):
        for _ in range(PREFILLS):
            decoding.add(PREFILL, 1)
        milliseconds, plan = decoding.step()
        assert plan.num_tokens == rows + PREFILLS * PREFILL
        taken.append(milliseconds)
    return statistics.median(taken)


def hash_ms(count: int) -> float:
    tokens = np.random.default_rng(0).integers(0, 32000, count).astype(np.int32)
    return 1e3 * _median_seconds(lambda: PrefixHasher(BLOCK_SIZE).extend(tokens), 50)


def alloc_release_ns(count: int) -> float:
    pool = BlockPool(16 * count)
    return 1e9 * _median_seconds(lambda: pool.release(pool.allocate(count)), 200) / count


def _median_seconds(run: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def ours(steps: int) -> Figures:
    return Figures(
        decode_step_ms={str(rows): decode_step_ms(rows, steps) for rows in (64, 256, 1024)},
        mixed_step_ms=mixed_step_ms(256, steps),
        hash_50k_ms=hash_ms(50_000),
        alloc_release_ns=alloc_release_ns(4096),
    )


def vllm_decode_step_ms(steps: int) -> dict[str, float]:
    """vLLM's medians for the rows of `Figures.decode_step_ms`; empty where it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        return {}
    return {
        str(rows): vllm_scheduler.decode_step_ms(
            rows,
            min(steps - 1, 60),
            prompt=PROMPT,
            block_size=BLOCK_SIZE,
            batched_tokens=rows + PREFILLS * PREFILL,
        )
        for rows in (64, 256, 1024)
    }


def report(figures: Figures, vllm: dict[str, float]) -> None:
    lines = {f"decode step, {rows} rows": (ms, "ms") for rows, ms in figures.decode_step_ms.items()}
    lines["256 rows decode, 8 prefills"] = figures.mixed_step_ms, "ms"
    lines["hash 50,000 tokens"] = figures.hash_50k_ms, "ms"
    lines["allocate + release, a block"] = figures.alloc_release_ns, "ns"
    theirs = {f"decode step, {rows} rows": ms for rows, ms in vllm.items()}
    if theirs:
        print(f"{'':<30}{'ours':>10}   {'vLLM':>12}{'ratio':>9}")
    for name, (value, unit) in lines.items():
        beside = f"{theirs[name]:>10.3f} ms{theirs[name] / value:>8.1f}x" if name in theirs else ""
        print(f"{name:<30}{value:>10.3f} {unit}{beside}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="steps a figure (default 300)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there")
    arguments = parser.parse_args()
    # Ours first: the modules that vLLM imports would slow our garbage collections.
    figures = ours(arguments.steps)
    vllm = vllm_decode_step_ms(arguments.steps)
    if arguments.json:
        written = figures._asdict() | ({"vllm_decode_step_ms": vllm} if vllm else {})
        arguments.json.write_text(json.dumps(written, indent=2) + "\n")
    # Into a closed pipe, end without a traceback.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    report(figures, vllm)


if __name__ == "__main__":
    main()
