"""Linear layers on the CPU: pagedattn's kernels beside oneDNN's packed product and torch's in bfloat16.

    uv run python tools/bench/linear.py [--model qwen3] [--threads 1] [--clock cpu] [--rows 1 64] [--rounds 9]

Each line has all matrix products of one step of a model with so many rows, head included. Its alternatives
run in turn, and ratios are medians of those within a round, so that a busy moment hits all of them. "fp32"
and "bf16" are the type that weights are stored in; rows and arithmetic are float32, except in torch's
bfloat16. The last columns say which share of the machine's reads and multiply-adds, measured in the same
rounds, the kernels reach.

`--clock cpu` counts the time that the calling thread ran, not the time it waited for a core: with one thread
it compares kernels on a machine that others use too.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median

import torch
from machine_limits import BUFFER_BYTES, MultiplyAdds, Reads
from torch import Tensor
from torch.nn import functional as F

from pagedattn import linear, pack_linear

Product = Callable[[Tensor], Tensor]
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
ROWS = (1, 4, 8, 16, 32, 64, 256)
# Layers, the (outputs, inputs) of each, and of the head; SmolLM2-135M and Qwen3-0.6B.
MODELS = {
    "smollm2": (30, [(960, 576), (576, 576), (3072, 576), (576, 1536)], (49_152, 576)),
    "qwen3": (28, [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)], (151_936, 1024)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{arguments.model}, {arguments.threads} threads, {arguments.clock} time, load average {load}")
    print(
        f"{'':5}{'oneDNN fp32':>14}{'torch bf16':>14}{'own fp32':>14}{'own bf16':>14}"
        f"{'of reads: fp32, bf16':>24}{'of multiply-adds':>20}"
    )
    with torch.inference_mode():
        step = Step(arguments.model)
        for rows in arguments.rows:
            print(step.line(rows, arguments.threads, CLOCKS[arguments.clock], arguments.rounds))


class Step:
    """All products of one step of a model, in four ways."""

    def __init__(self, model: str) -> None:
        layers, shapes, head = MODELS[model]
        torch.manual_seed(0)
        weights = [torch.randn(shape).mul_(0.05).bfloat16() for shape in [*shapes * layers, head]]
        self.products = sum(weight.numel() for weight in weights)
        self.packed_bytes = {"fp32": 0, "bf16": 0}
        self.ways: dict[str, list[tuple[int, Product]]] = {"onednn": [], "torch": [], "fp32": [], "bf16": []}
        for weight in weights:
            ways = {"onednn": _onednn(weight.float()), "torch": _torch(weight)}
            for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
                packed = pack_linear(weight, dtype)
                self.packed_bytes[name] += packed.nbytes
                ways[name] = lambda x, packed=packed: linear(x, packed)
            for name, product in ways.items():
                self.ways[name].append((weight.shape[1], product))

    def line(self, rows: int, threads: int, clock: Callable[[], float], rounds: int) -> str:
        """Times of a step with so many rows, their ratios to oneDNN's, and shares of the machine's limits."""
        inputs = {width: torch.randn(rows, width) for width in {width for width, _ in self.ways["fp32"]}}
        narrow = {width: x.bfloat16() for width, x in inputs.items()}
        runs: dict[str, Callable[[], object]] = {
            name: lambda name=name: _run(self.ways[name], narrow if name == "torch" else inputs)
            for name in self.ways
        }
        reads, multiply_adds = Reads(threads), MultiplyAdds(threads)
        times = measure(runs | {"reads": reads, "multiply-adds": multiply_adds}, clock, rounds)

        def share(name: str, work: float, limit: str, most: float) -> float:
            return median(work / own / (most / best) for own, best in zip(times[name], times[limit]))

        text = f"{rows:4} "
        for name in self.ways:
            ratio = median(base / own for base, own in zip(times["onednn"], times[name]))
            text += f"{median(times[name]) * 1e3:8.1f} {ratio:4.2f}x"
        for name, packed_bytes in self.packed_bytes.items():
            text += f"{share(name, packed_bytes, 'reads', BUFFER_BYTES):12.0%}"
        for name in self.packed_bytes:
            operations = 2 * self.products * rows
            text += f"{share(name, operations, 'multiply-adds', multiply_adds.operations):10.0%}"
        return text


def measure(
    runs: dict[str, Callable[[], object]], clock: Callable[[], float], rounds: int
) -> dict[str, list[float]]:
    """Seconds of each in every round, after one that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            began = clock()
            run()
            times[name].append(clock() - began)
    return {name: taken[1:] for name, taken in times.items()}


def _run(products: list[tuple[int, Product]], inputs: dict[int, Tensor]) -> None:
    for width, product in products:
        product(inputs[width])


def _onednn(weight: Tensor) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _torch(weight: Tensor) -> Product:
    return lambda x: F.linear(x, weight)


if __name__ == "__main__":
    main()
