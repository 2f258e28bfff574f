"""Speed of the kernels, beside what the device copies and multiplies at most."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch

from gpu_check.case import FP8
from pagedattn import (
    AttentionBatch,
    attend,
    build_batch,
    grouped_matmul,
    rms_norm,
    rotary,
    silu_and_mul,
    top_k_top_p_sample,
)

DEVICE = torch.device("cuda")
Q_HEADS, BLOCK_SIZE = 32, 16
BATCHES, CONTEXTS = (1, 16, 64), (512, 4096, 32768)
# (sequences, tokens each)
PROMPTS = ((1, 512), (16, 512), (1, 4096), (1, 32768))
HEAD_DIMS, GROUPS = (64, 128), (4, 8)
DTYPES = {"bf16": torch.bfloat16, "fp8": FP8}


def measure_decode(interpret: bool) -> dict[str, Any]:
    """Decodes: bytes of keys and values read a second, and as a share of the device's copy rate."""
    copy_rate = _copy_rate()
    figures = {}
    for head_dim, group, (dtype_name, dtype) in product(HEAD_DIMS, GROUPS, DTYPES.items()):
        kv_heads = Q_HEADS // group
        token_bytes = 2 * kv_heads * head_dim * dtype.itemsize
        cache = _cache(BATCHES[-1] * CONTEXTS[-1], kv_heads, head_dim, dtype)
        for batch, context in product(BATCHES, CONTEXTS):
            name = f"batch {batch}, context {context}, head {head_dim}, GQA {group}, {dtype_name}"
            if batch * context > cache.shape[0] * BLOCK_SIZE:
                figures[name] = {"skipped": "the device has too little memory"}
                continue
            query = torch.randn(batch, Q_HEADS, head_dim, dtype=torch.bfloat16, device=DEVICE)
            step = _batch([1] * batch, [context] * batch, cache.shape[0])
            seconds = _graphed(lambda q=query, c=cache, s=step: attend(q, c, s, scale=0.1))
            rate = batch * context * token_bytes / seconds
            figures[name] = {
                "microseconds": round(seconds * 1e6, 1),
                "gb_per_s": round(rate / 1e9, 1),
                "share_of_copy": round(rate / copy_rate, 3),
            }
    return {"copy_gb_per_s": round(copy_rate / 1e9, 1), "figures": figures}


def measure_prefill(interpret: bool) -> dict[str, Any]:
    """Prompts: operations a second, and as a share of the device's bfloat16 matrix products."""
    matmul_rate = _matmul_rate()
    figures = {}
    for head_dim, group, (dtype_name, dtype) in product(HEAD_DIMS, GROUPS, DTYPES.items()):
        cache = _cache(max(count * length for count, length in PROMPTS), Q_HEADS // group, head_dim, dtype)
        for count, length in PROMPTS:
            query = torch.randn(count * length, Q_HEADS, head_dim, dtype=torch.bfloat16, device=DEVICE)
            step = _batch([length] * count, [length] * count, cache.shape[0])
            seconds = _graphed(lambda q=query, c=cache, s=step: attend(q, c, s, scale=0.1), launches=2)
            rate = 4 * Q_HEADS * head_dim * count * length * (length + 1) / 2 / seconds
            figures[f"{count} of {length}, head {head_dim}, GQA {group}, {dtype_name}"] = {
                "milliseconds": round(seconds * 1e3, 3),
                "tflops": round(rate / 1e12, 1),
                "share_of_matmul": round(rate / matmul_rate, 3),
            }
    return {"matmul_tflops": round(matmul_rate / 1e12, 1), "figures": figures}


def measure_ops(interpret: bool) -> dict[str, Any]:
    """The operations around attention at sizes of an 8B model, 64 rows a step; microseconds a call."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)

    x, weight, fused, gate_up = random(64, 4096), random(4096), random(64, 48, 128), random(64, 28672)
    angles = torch.randn(64, 128, device=DEVICE)
    routed, experts, starts = (
        random(64, 2048),
        random(60, 1408, 2048),
        torch.arange(61, device=DEVICE) * 64 // 60,
    )
    calls: dict[str, Callable[[], Any]] = {
        "rms_norm and residual": lambda: rms_norm(x, weight, 1e-6, x),
        "rotary": lambda: rotary(fused[:, :32], fused[:, 32:40], None, angles),
        "silu_and_mul": lambda: silu_and_mul(gate_up),
        "grouped_matmul, 64 rows to 60 experts": lambda: grouped_matmul(routed, experts, starts),
    }
    for rows, (name, top_k, top_p) in product(
        (1, 64), (("all", 0, 1.0), ("top-p", 0, 0.95), ("top-k", 50, 1.0))
    ):
        calls[f"sampling {rows} rows of 128256, {name}"] = _sampling(rows, top_k, top_p)
    return {"figures": {name: round(_graphed(call) * 1e6, 1) for name, call in calls.items()}}


def _sampling(rows: int, top_k: int, top_p: float) -> Callable[[], torch.Tensor]:
    logits = torch.randn(rows, 128_256, device=DEVICE) * 2.5
    columns = {
        "temperature": torch.full((rows,), 0.8, device=DEVICE),
        "top_k": torch.full((rows,), top_k, dtype=torch.int32, device=DEVICE),
        "top_p": torch.full((rows,), top_p, device=DEVICE),
        "min_p": torch.zeros(rows, device=DEVICE),
        "seeds": torch.arange(rows, device=DEVICE),
        "positions": torch.arange(rows, device=DEVICE),
    }
    return lambda: top_k_top_p_sample(logits, **columns, backend="triton")


def _cache(tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """A random cache for `tokens`, or for as many as fit in most of the device's free memory."""
    torch.cuda.empty_cache()
    block_bytes = 2 * kv_heads * BLOCK_SIZE * head_dim * dtype.itemsize
    blocks = min(tokens // BLOCK_SIZE, int(torch.cuda.mem_get_info()[0] * 0.8) // block_bytes)
    shape = (blocks, 2, kv_heads, BLOCK_SIZE, head_dim)
    if dtype == FP8:  # finite numbers of either sign, up to 1.9
        low = torch.randint(0, 64, shape, dtype=torch.uint8, device=DEVICE)
        return low.view(FP8)
    return torch.empty(shape, dtype=dtype, device=DEVICE).normal_()


def _batch(queries: list[int], lengths: list[int], num_blocks: int) -> AttentionBatch:
    """A step over blocks that lie about at random."""
    order = torch.randperm(num_blocks).tolist()
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    tables = [order[sum(counts[:i]) : sum(counts[: i + 1])] for i in range(len(counts))]
    return build_batch(queries, lengths, tables, block_size=BLOCK_SIZE, device=DEVICE)


def _copy_rate() -> float:
    """Bytes read and written a second by a copy within the device."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / _graphed(lambda: target.copy_(source), launches=2)


def _matmul_rate(size: int = 8192) -> float:
    a, b = torch.randn(2, size, size, device=DEVICE).bfloat16()
    return 2 * size**3 / _graphed(lambda: a @ b, launches=2)


def _graphed(call: Callable[[], Any], launches: int = 10, repeats: int = 5) -> float:
    """Seconds a call takes on the device: the best of `repeats` replays of a graph of `launches` calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    graph.replay()
    best = float("inf")
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop) / 1e3 / launches)
    return best
