"""Roofline: measured memory reads and matrix products, and the rates they allow a model.

`python -m compare.limits` measures, with as many threads as OMP_NUM_THREADS says.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine_limits import BUFFER_BYTES, Reads

from compare.workloads import Request

_BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class Shape:
    """A model, as far as reads and multiplications depend on it."""

    layer_weights: int
    """In the matrices of all layers."""
    head_weights: int
    cache_values: int
    """Keys and values of a token, in all layers."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Shape":
        """Read a config.json of a dense model with gated linear units."""
        hidden, heads, kv_heads = (
            config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
        )
        head_dim = config.get("head_dim") or hidden // heads
        attention = 2 * hidden * head_dim * (heads + kv_heads)
        layer = attention + 3 * hidden * config["intermediate_size"]
        layers = config["num_hidden_layers"]
        return cls(layers * layer, hidden * config["vocab_size"], layers * 2 * kv_heads * head_dim)


def bounds(
    shape: Shape, requests: Sequence[Request], dtype: str, read_gb_s: float, gflop_s: float
) -> dict[str, float]:
    """Lower bounds of a workload's latencies, and an upper bound of its rate.

    A prompt is multiplied by the layers once for all requests that share it, the head by output tokens only;
    each step reads all weights and the cache of its context once. Attention's multiplications are left out.
    """
    size, output = _BYTES[dtype], [request.max_tokens for request in requests]
    shared = _common_prefix([request.prompt for request in requests]) if len(requests) > 1 else 0
    prompt = shared + sum(len(request.prompt) - shared for request in requests)
    # The last token is not an input.
    inputs = prompt + sum(output) - len(requests)
    operations = 2 * (shape.layer_weights * inputs + shape.head_weights * sum(output))
    weights = shape.layer_weights + shape.head_weights
    context = sum(
        tokens * len(request.prompt) + tokens * (tokens - 1) // 2 for tokens, request in zip(output, requests)
    )
    read = size * (max(output) * weights + context * shape.cache_values)
    seconds = max(operations / gflop_s, read / read_gb_s) / 1e9
    figures = {"output_tok_s": sum(output) / seconds}
    if len(requests) == 1:
        first = 2 * (shape.layer_weights * prompt + shape.head_weights)
        figures["ttft_p50_ms"] = 1000 * max(first / gflop_s, size * weights / read_gb_s) / 1e9
        tokens = prompt + output[0] / 2
        figures["tpot_p50_ms"] = 1000 * size * (weights + tokens * shape.cache_values) / read_gb_s / 1e9
    return figures


def measure(threads: int) -> dict[str, float]:
    """Return the machine's limits, measured in a process of its own."""
    variables = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    variables["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    output = subprocess.run(
        [sys.executable, "-P", "-m", "compare.limits"], env=variables, check=True, stdout=subprocess.PIPE
    ).stdout
    return json.loads(output)


def _common_prefix(prompts: Sequence[list[int]]) -> int:
    first, last = min(prompts), max(prompts)
    for place, (one, other) in enumerate(zip(first, last)):
        if one != other:
            return place
    return min(len(first), len(last))


def _best_seconds(work: Callable[[], Any]) -> float:
    """The least time of a call, of those in two seconds."""
    work()
    times = []
    end = time.perf_counter() + 2
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Measure reads of memory and products of matrices of 2048 × 2048."""
    import torch

    rates = {"read_gb_s": BUFFER_BYTES / _best_seconds(Reads(torch.get_num_threads())) / 1e9}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        one, other = (torch.rand(2048, 2048).to(dtype) for _ in range(2))
        seconds = _best_seconds(lambda one=one, other=other: one @ other)
        rates[f"{name}_gflop_s"] = 2 * 2048**3 / seconds / 1e9
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
