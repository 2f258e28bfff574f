"""Compiles the Triton attention kernels for a made-up CUDA device and reports on them, as JSON.

A program of its own, since Triton must be imported without TRITON_INTERPRET. The driver below stands
where a GPU's would, so the kernels are specialised and compiled exactly as at a real launch; only the
launch itself does nothing. Usage: compile_kernels.py ARCH [--all] with ARCH 80 or 90: a selection of cases,
or all, which takes half an hour.
"""

import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
import triton
from pagedattn_reference import make_case
from triton import knobs
from triton.backends.compiler import GPUTarget

from pagedattn.backends import ScoreOptions
from pagedattn.triton_backend import attention, cascade, kernels, split
from pagedattn.triton_backend.plan import Device, make_plan, share_prefix

SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10}
SEQUENCES = {
    "prefill": [(40, 60), (129, 129)],
    "mixed": [(1, 9), (1, 300), (129, 129)],
    "decode": [(1, 9), (1, 300)],
    "verify": [(4, 9), (3, 300)],
    "split": [(1, 9), (1, 300)],
    "cascade": [(1, 90)] * 40,
}
# name: (query dtype, float8 cache)
DTYPES = {
    "fp16": (torch.float16, False),
    "bf16": (torch.bfloat16, False),
    "fp32": (torch.float32, False),
    "fp8": (torch.bfloat16, True),
}
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 192, 256)
BLOCK_SIZES = (16, 24, 256)
OPTIONS = ("plain", "all")
# Every kind, dtype, head_dim, option and block size, and what comes nearest to the limits.
SELECTION = """
prefill fp16 64 plain 16;   prefill bf16 128 plain 16;  prefill fp16 80 all 24;    prefill bf16 256 all 16
prefill fp8 128 plain 256;  prefill fp32 256 all 16;    mixed bf16 128 plain 16;   mixed bf16 80 all 256
mixed fp8 128 all 16;       mixed bf16 256 all 16;      decode bf16 128 plain 16;  decode fp16 112 all 24
decode fp8 64 all 16;       decode fp32 64 all 16;      verify fp8 256 plain 256;  split bf16 32 all 16
split fp8 128 plain 16;     split fp32 256 all 16;      cascade bf16 128 plain 16; cascade fp8 128 all 16
cascade fp32 256 all 24
"""


class MadeUpDriver:
    """The part of a Triton driver that compiling and launching call."""

    def __init__(self, arch):
        self.arch = arch
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY[arch]},
            load_binary=lambda name, binary, shared, device: (None, None, 0, 0, 1024),
        )

    def launcher_cls(self, source, metadata):
        return lambda *arguments: None

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def use_device(arch):
    driver: Any = MadeUpDriver(arch)
    triton.runtime.driver.set_active(driver)
    device = Device(divmod(arch, 10), 132)
    attention.describe_device = lambda _: device
    return device


def all_cases():
    """Block sizes other than 16 change addresses only and are tried on one head_dim."""
    cases = product(SEQUENCES, DTYPES, HEAD_DIMS, OPTIONS, BLOCK_SIZES)
    return [" ".join(map(str, case)) for case in cases if case[4] == 16 or case[2] == 128]


def compile_case(arch, name):
    """A report on the kernel that case `name` (kind, dtype, head_dim, options, block size) launches."""
    device = use_device(arch)
    kind, dtype, head_dim, chosen, block_size = name.split()
    query_dtype, fp8 = DTYPES[dtype]
    case = make_case(
        SEQUENCES[kind],
        q_heads=12,
        kv_heads=3,
        head_dim=int(head_dim),
        block_size=int(block_size),
        dtype=query_dtype,
        fp8=fp8,
    )
    arguments = {"window": None, "soft_cap": None, "alibi_slopes": None, "sinks": None}
    if chosen == "all":
        per_head = torch.zeros(12)
        window = None if kind == "cascade" else 40
        arguments = {"window": window, "soft_cap": 30.0, "alibi_slopes": per_head, "sinks": per_head}
    options = ScoreOptions(0.1, **arguments, kv_scales=case.kv_scales)
    plan = make_plan(case.query, case.cache, case.batch, options.window, device)
    kernel = kernels.attend_kernel
    if kind == "split":
        plan = plan._replace(splits=8)
    elif kind == "cascade":
        plan = share_prefix(plan, case.query, case.cache, case.batch, device)
        kernel = cascade.attend_prefix_kernel
    kernel.device_caches.clear()
    attention.attend_by_plan(case.query, case.cache, case.batch, options, torch.empty_like(case.query), plan)
    return name, describe(*kernel.device_caches[0][0].values())


def compile_small(arch):
    """Reports on the merge and on storing keys and values."""
    compile_case(arch, "split bf16 128 all 16")
    reports = {"merge": describe(*split.merge_kernel.device_caches[0][0].values())}
    key = torch.zeros(4, 3, 80, dtype=torch.bfloat16)
    for name, dtype in {"write_kv bf16": torch.bfloat16, "write_kv fp8": torch.float8_e4m3fn}.items():
        kernels.write_kv_kernel.device_caches.clear()
        cache = torch.zeros(2, 2, 3, 16, 80, dtype=dtype)
        scales = torch.ones(2, 3) if dtype == torch.float8_e4m3fn else None
        attention.write_kv(key, key, cache, torch.arange(4), scales)
        reports[name] = describe(*kernels.write_kv_kernel.device_caches[0][0].values())
    return reports


def describe(compiled):
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0])
    return {
        "cubin_bytes": len(compiled.asm["cubin"]),
        "shared": compiled.metadata.shared,
        "registers": registers,
        "warps": compiled.metadata.num_warps,
        "stack": stack,
        "mma": ptx.count("mma.sync"),
        "wgmma": ptx.count("wgmma.mma_async"),
        "async_copies": len(re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*, 0x10", ptx)),
        "divisions": len(re.findall(r"\b(?:div|rem)\.[su]", ptx)),
    }


def main():
    arch = int(sys.argv[1])
    names = [name.strip() for name in re.split(r";|\n", SELECTION) if name.strip()]
    if "--all" in sys.argv:
        names = all_cases()
    # Processes, since LLVM holds Python's lock while it compiles.
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        small = pool.submit(compile_small, arch)
        reports = dict(pool.map(compile_case, [arch] * len(names), names))
    json.dump(reports | small.result(), sys.stdout)


if __name__ == "__main__":
    main()
