"""Linear layers on the CPU: pagedattn's kernels beside oneDNN's packed products.

    uv run python tools/bench/linear.py [--model qwen3] [--threads 1] [--clock cpu] [--rows 1 64] [--rounds 9]

Each line has all matrix products of one step of a model with so many rows, head included. Ways run in turn,
and a ratio is the median, over rounds, of oneDNN's time in the type of x by the way's own, so that a busy
moment hits both. The last columns say which share of the machine's reads and float32 multiply-adds, measured
in the same rounds, a way reaches.

`--clock cpu` counts the time that the calling thread ran, not the time it waited for a core: with one thread
it compares kernels on a machine that others use too.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from machine_limits import BUFFER_BYTES, MultiplyAdds, Reads
from torch import Tensor

from pagedattn import Quantization, linear, pack_linear

SINGLE, BFLOAT = torch.float32, torch.bfloat16
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
ROWS = (1, 4, 8, 16, 32, 64, 256)
# Layers, the (outputs, inputs) of each, and of the head; SmolLM2-135M and Qwen3-0.6B.
MODELS = {
    "smollm2": (30, [(960, 576), (576, 576), (3072, 576), (576, 1536)], (49_152, 576)),
    "qwen3": (28, [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)], (151_936, 1024)),
}


class Way(NamedTuple):
    """Types of x and of the weight (None: oneDNN's, of x's type), and the way to compare with."""

    x: torch.dtype
    weight: torch.dtype | Quantization | None
    base: str


WAYS = {
    "oneDNN fp32": Way(SINGLE, None, "oneDNN fp32"),
    "oneDNN bf16": Way(BFLOAT, None, "oneDNN bf16"),
    "fp32 · fp32": Way(SINGLE, SINGLE, "oneDNN fp32"),
    "fp32 · bf16": Way(SINGLE, BFLOAT, "oneDNN fp32"),
    "bf16 · bf16": Way(BFLOAT, BFLOAT, "oneDNN bf16"),
    "fp32 · int8": Way(SINGLE, "int8", "oneDNN fp32"),
    "fp32 · int8-dynamic": Way(SINGLE, "int8-dynamic", "oneDNN fp32"),
    "bf16 · int8-dynamic": Way(BFLOAT, "int8-dynamic", "oneDNN bf16"),
    "fp32 · int4": Way(SINGLE, "int4", "oneDNN fp32"),
    "bf16 · int8": Way(BFLOAT, "int8", "oneDNN bf16"),
    "bf16 · int4": Way(BFLOAT, "int4", "oneDNN bf16"),
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
        f"{'rows':>4}  {'x · weight':20}{'ms':>8}{'oneDNN / it':>14}{'of reads':>11}{'of multiply-adds':>19}"
    )
    with torch.inference_mode():
        step = Step(arguments.model)
        for rows in arguments.rows:
            step.measure(rows, arguments.threads, CLOCKS[arguments.clock], arguments.rounds)


class Step:
    """All products of one step of a model, in every way."""

    def __init__(self, model: str) -> None:
        layers, shapes, head = MODELS[model]
        torch.manual_seed(0)
        weights = [torch.randn(shape).mul_(0.05).bfloat16() for shape in [*shapes * layers, head]]
        self.products = sum(weight.numel() for weight in weights)
        self.layers = {name: [Layer(way, weight) for weight in weights] for name, way in WAYS.items()}

    def measure(self, rows: int, threads: int, clock: Callable[[], float], rounds: int) -> None:
        """Print a line for each way with so many rows."""
        reads, multiply_adds = Reads(threads), MultiplyAdds(threads)
        widths = {layer.inputs for layers in self.layers.values() for layer in layers}
        rows_of = {
            (width, dtype): torch.randn(rows, width).to(dtype)
            for width in widths
            for dtype in (SINGLE, BFLOAT)
        }
        runs: dict[str, Callable[[], object]] = {"reads": reads, "multiply-adds": multiply_adds}
        for name, layers in self.layers.items():
            runs[name] = lambda layers=layers, dtype=WAYS[name].x: [
                layer(rows_of[layer.inputs, dtype]) for layer in layers
            ]
        times = in_turn(runs, clock, rounds)

        def ratio(first: str, second: str) -> float:
            return median(one / other for one, other in zip(times[first], times[second]))

        for name, layers in self.layers.items():
            packed_bytes = sum(layer.nbytes for layer in layers)
            operations = 2 * self.products * rows
            print(
                f"{rows:4}  {name:20}{median(times[name]) * 1e3:8.1f}{ratio(WAYS[name].base, name):14.2f}"
                f"{ratio('reads', name) * packed_bytes / BUFFER_BYTES:11.0%}"
                f"{ratio('multiply-adds', name) * operations / multiply_adds.operations:19.0%}",
                flush=True,
            )


class Layer:
    """One product, with its weight packed."""

    def __init__(self, way: Way, weight: Tensor) -> None:
        self.inputs = weight.shape[1]
        if way.weight is None:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(way.x), 64)
            self.nbytes = weight.numel() * way.x.itemsize
            self._product = lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        else:
            if isinstance(way.weight, torch.dtype):
                own = pack_linear(weight, way.weight)
            else:
                own = pack_linear(weight, quantization=way.weight)
            self.nbytes = own.nbytes
            self._product = lambda x: linear(x, own)

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x)


def in_turn(
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


if __name__ == "__main__":
    main()
