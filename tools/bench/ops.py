"""The operations around attention on the CPU: the C kernels beside the torch back end.

    uv run python tools/bench/ops.py [--threads N] [--only NAME]

Every line is one problem; its alternatives are timed in turn, over and over, and each figure is the best.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from pagedattn import gelu_and_mul, rms_norm, rotary, silu_and_mul, top_k_top_p_sample

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
VOCAB = 49_152
# Name, standard deviation of the logits, settings.
SAMPLING: list[tuple[str, float, dict[str, float]]] = [
    ("greedy", 2.0, {"temperature": 0.0}),
    ("temperature", 2.0, {}),
    ("min-p 0.05", 2.0, {"min_p": 0.05}),
    ("top-k 50", 2.0, {"top_k": 50}),
    ("top-k 4000", 2.0, {"top_k": 4000}),
    ("top-p 0.95 peaked", 6.0, {"top_p": 0.95}),
    ("top-p 0.95", 2.0, {"top_p": 0.95}),
    ("top-p 0.95 flat", 0.1, {"top_p": 0.95}),
    ("top-k 50, top-p 0.95", 2.0, {"top_k": 50, "top_p": 0.95}),
]

Problem = tuple[str, Callable[[str], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="", help="problems whose name holds this")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"{arguments.threads} threads, torch {torch.__version__}")
    print(f"{'':44} torch µs      C µs   ratio")
    with torch.inference_mode():
        for name, run in [*small_problems(), *sampling_problems()]:
            if arguments.only in name:
                plain, fast = best_times([partial(run, "torch"), partial(run, "cpu")])
                print(f"{name:44} {plain * 1e6:8.1f} {fast * 1e6:9.1f} {plain / fast:6.1f}x")


def small_problems() -> Iterator[Problem]:
    for dtype_name, dtype in DTYPES.items():
        for shape in ((1, 576), (32, 576), (64, 1536), (512, 2048)):
            x, weight = torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
            label = f"{list(shape)} {dtype_name}"
            yield f"rms_norm {label}", partial(_norm, x, weight, None)
            yield f"rms_norm + residual {label}", partial(_norm, x, weight, x.clone())
        for tokens, heads, kv_heads, head_dim in (
            (1, 9, 3, 64),
            (32, 9, 3, 64),
            (64, 9, 3, 64),
            (512, 32, 8, 128),
        ):
            fused = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
            turns = partial(
                _rotary, fused[:, :heads], fused[:, heads : heads + kv_heads], torch.randn(tokens, head_dim)
            )
            yield f"rotary {tokens} x {heads}/{kv_heads} x {head_dim} {dtype_name}", turns
        for shape in ((1, 576), (1, 3072), (32, 576), (64, 3072), (512, 8192)):
            x = torch.randn(shape).to(dtype)
            yield f"silu_and_mul {list(shape)} {dtype_name}", partial(_silu, x)
            yield f"gelu_and_mul tanh {list(shape)} {dtype_name}", partial(_gelu, x, "tanh")
            yield f"gelu_and_mul erf {list(shape)} {dtype_name}", partial(_gelu, x, "none")


def _norm(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, backend: str) -> object:
    if residual is None:
        return rms_norm(x, weight, 1e-5, backend=backend)
    return rms_norm(x, weight, 1e-5, residual, backend=backend)


def _rotary(query: torch.Tensor, key: torch.Tensor, rows: torch.Tensor, backend: str) -> object:
    return rotary(query, key, None, rows, backend=backend)


def _silu(x: torch.Tensor, backend: str) -> object:
    return silu_and_mul(x, backend=backend)


def _gelu(x: torch.Tensor, approximate: str, backend: str) -> object:
    return gelu_and_mul(x, "tanh" if approximate == "tanh" else "none", backend=backend)


def sampling_problems() -> Iterator[Problem]:
    for rows in (1, 64):
        for name, deviation, settings in SAMPLING:
            logits = torch.randn(rows, VOCAB) * deviation
            yield f"sample {rows} x {VOCAB} {name}", partial(_sample, logits, _columns(rows, settings))
        yield (
            f"argmax beside greedy {rows} x {VOCAB}",
            partial(_greedy, logits, _columns(rows, {"temperature": 0.0})),
        )


def _columns(rows: int, settings: dict[str, float]) -> dict[str, torch.Tensor]:
    return {
        "temperature": torch.full((rows,), settings.get("temperature", 1.0)),
        "top_k": torch.full((rows,), int(settings.get("top_k", 0)), dtype=torch.int32),
        "top_p": torch.full((rows,), settings.get("top_p", 1.0)),
        "min_p": torch.full((rows,), settings.get("min_p", 0.0)),
        "seeds": torch.arange(rows),
        "positions": torch.arange(rows),
    }


def _sample(logits: torch.Tensor, columns: dict[str, torch.Tensor], backend: str) -> object:
    return top_k_top_p_sample(logits, **columns, backend=backend)


def _greedy(logits: torch.Tensor, columns: dict[str, torch.Tensor], backend: str) -> object:
    if backend == "torch":
        return logits.argmax(-1)
    return top_k_top_p_sample(logits, **columns, backend=backend)


def best_times(alternatives: list[Callable[[], object]], seconds: float = 0.25) -> list[float]:
    """Seconds that each takes, at best; calls that take microseconds are timed by the hundred."""
    counts = []
    for run in alternatives:
        run()
        began = time.perf_counter()
        run()
        counts.append(max(1, min(100, int(1e-3 / (time.perf_counter() - began)))))
    best = [float("inf")] * len(alternatives)
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        for index, (run, count) in enumerate(zip(alternatives, counts)):
            began = time.perf_counter()
            for _ in range(count):
                run()
            best[index] = min(best[index], (time.perf_counter() - began) / count)
    return best


if __name__ == "__main__":
    main()
