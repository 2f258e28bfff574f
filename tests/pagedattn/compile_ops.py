"""Compiles the Triton kernels around attention for a made-up CUDA device; a report on each, as JSON.

A program of its own, as compile_kernels.py is, and with the same device. Usage: compile_ops.py ARCH.
"""

import json
import sys

import torch
from compile_kernels import describe, use_device

from pagedattn import triton_backend
from pagedattn.triton_backend.bitmask import bitmask_kernel
from pagedattn.triton_backend.copies import copy_blocks_kernel
from pagedattn.triton_backend.gated import gated_kernel
from pagedattn.triton_backend.grouped import grouped_matmul_kernel
from pagedattn.triton_backend.norm import rms_norm_kernel
from pagedattn.triton_backend.rotary import rotary_kernel
from pagedattn.triton_backend.sampling import sample_kernel

SINGLE, HALF, BFLOAT = torch.float32, torch.float16, torch.bfloat16


def launch_norm(size, dtype, rows=4, *, residual=False):
    x = torch.zeros(rows, size, dtype=dtype)
    triton_backend.rms_norm(x, torch.ones(size, dtype=dtype), 1e-5, x if residual else None)


def launch_rotary(head_dim, rotary_dim, dtype, *, interleaved=False, positions=None):
    fused = torch.zeros(3, 24, head_dim, dtype=dtype)
    triton_backend.rotary(fused[:, :16], fused[:, 16:20], positions, torch.zeros(3, rotary_dim), interleaved)


def launch_grouped(rows, dtype, experts=8, in_size=1024, out_size=512):
    x, weight = torch.zeros(rows, in_size, dtype=dtype), torch.zeros(experts, out_size, in_size, dtype=dtype)
    triton_backend.grouped_matmul(x, weight, torch.zeros(experts + 1, dtype=torch.int32))


def launch_copies(dtype):
    cache = torch.zeros(2, 4, 2, 2, 16, 64, dtype=dtype)
    triton_backend.copy_blocks(cache, cache, torch.tensor([[0, 1]]))


def launch_sampling(vocab, dtype):
    triton_backend.top_k_top_p_sample(
        torch.zeros(2, vocab, dtype=dtype),
        *(torch.ones(2), torch.ones(2, dtype=torch.int32), torch.ones(2), torch.zeros(2)),
        *torch.zeros(2, 2, dtype=torch.int64),
    )


def launch_bitmask(vocab, dtype, *, listed):
    rows = torch.tensor([1]) if listed else None
    mask = torch.zeros(1 if listed else 2, -(-vocab // 32), dtype=torch.int32)
    triton_backend.apply_token_bitmask(torch.zeros(2, vocab, dtype=dtype), mask, rows)


# name: (kernel, launch, arguments, keywords)
CASES = {
    "norm bf16 576": (rms_norm_kernel, launch_norm, (576, BFLOAT), {}),
    "norm bf16 64": (rms_norm_kernel, launch_norm, (64, BFLOAT, 100), {}),
    "norm bf16 4096 residual": (rms_norm_kernel, launch_norm, (4096, BFLOAT), {"residual": True}),
    "norm fp16 16384 residual": (rms_norm_kernel, launch_norm, (16384, HALF), {"residual": True}),
    "norm fp32 8192 residual": (rms_norm_kernel, launch_norm, (8192, SINGLE), {"residual": True}),
    "rotary bf16 128": (rotary_kernel, launch_rotary, (128, 128, BFLOAT), {}),
    "rotary fp32 80 of 20 interleaved": (
        rotary_kernel,
        launch_rotary,
        (80, 20, SINGLE),
        {"interleaved": True, "positions": torch.arange(3)},
    ),
    "silu bf16": (
        gated_kernel,
        triton_backend.silu_and_mul,
        (torch.zeros(4, 8192, dtype=BFLOAT),),
        {},
    ),
    "gelu tanh bf16": (
        gated_kernel,
        triton_backend.gelu_and_mul,
        (torch.zeros(4, 8192, dtype=BFLOAT), "tanh"),
        {},
    ),
    "gelu erf fp32": (
        gated_kernel,
        triton_backend.gelu_and_mul,
        (torch.zeros(4, 200), "none"),
        {},
    ),
    "grouped bf16, few rows": (grouped_matmul_kernel, launch_grouped, (8, BFLOAT), {}),
    "grouped bf16, more rows": (grouped_matmul_kernel, launch_grouped, (400, BFLOAT), {}),
    "grouped bf16, many rows": (grouped_matmul_kernel, launch_grouped, (4000, BFLOAT), {}),
    "grouped fp16, odd sizes": (
        grouped_matmul_kernel,
        launch_grouped,
        (4000, HALF),
        {"in_size": 1001, "out_size": 77},
    ),
    "grouped fp32, few rows": (grouped_matmul_kernel, launch_grouped, (8, SINGLE), {}),
    "grouped fp32, many rows": (grouped_matmul_kernel, launch_grouped, (4000, SINGLE), {}),
    "copies bf16": (copy_blocks_kernel, launch_copies, (BFLOAT,), {}),
    "copies fp8": (copy_blocks_kernel, launch_copies, (torch.float8_e4m3fn,), {}),
    "sampling fp32": (sample_kernel, launch_sampling, (50257, SINGLE), {}),
    "sampling bf16": (sample_kernel, launch_sampling, (151936, BFLOAT), {}),
    "bitmask fp32": (bitmask_kernel, launch_bitmask, (50257, SINGLE), {"listed": True}),
    "bitmask bf16, every row": (bitmask_kernel, launch_bitmask, (151936, BFLOAT), {"listed": False}),
    "sampling of few": (sample_kernel, launch_sampling, (100, SINGLE), {}),
}


def main():
    use_device(int(sys.argv[1]))
    reports = {}
    for name, (kernel, launch, arguments, keywords) in CASES.items():
        kernel.device_caches.clear()
        launch(*arguments, **keywords)
        reports[name] = describe(*kernel.device_caches[0][0].values())
    json.dump(reports, sys.stdout)


if __name__ == "__main__":
    main()
