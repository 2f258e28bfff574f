"""Launches the Triton back end on a made-up CUDA device and reports on what was compiled, as JSON.

A program of its own, since Triton must be imported without TRITON_INTERPRET. The driver below stands
where a GPU's would, so the kernels are specialised and compiled exactly as at a real launch; only the
launch itself does nothing. Usage: compile_kernels.py ARCH (80 or 90).
"""

import json
import re
import subprocess
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
import triton
from pagedattn_reference import make_case
from triton import knobs
from triton.backends.compiler import GPUTarget

from pagedattn import triton_backend
from pagedattn.backends import ScoreOptions
from pagedattn.triton_backend import kernels, split

SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10}
PREFILL, DECODE = [(1, 9), (40, 60), (129, 129)], [(1, 9), (1, 300)]
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
ALL_OPTIONS = {
    "window": 40,
    "soft_cap": 30.0,
    "alibi_slopes": torch.zeros(12),
    "sinks": torch.zeros(12),
}
# name: (sequences, dtype, kv_heads of 12 query heads, head_dim, options)
CASES = {
    "prefill fp16 64": (PREFILL, HALF, 4, 64, {}),
    "prefill fp16 128": (PREFILL, HALF, 3, 128, {}),
    "prefill bf16 128": (PREFILL, BFLOAT, 3, 128, {}),
    "prefill fp16 80 all options": (PREFILL, HALF, 4, 80, ALL_OPTIONS),
    "prefill fp16 256": (PREFILL, HALF, 4, 256, {}),
    "prefill fp32 64": (PREFILL, SINGLE, 4, 64, {}),
    "decode fp16 64": (DECODE, HALF, 4, 64, {}),
    "decode bf16 128": (DECODE, BFLOAT, 3, 128, {}),
    "decode fp32 128": (DECODE, SINGLE, 12, 128, {}),
    "split decode fp16 128": (DECODE, HALF, 3, 128, {}),
    "split decode bf16 64 all options": (DECODE, BFLOAT, 4, 64, ALL_OPTIONS),
}


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


def compile_case(sequences, dtype, kv_heads, head_dim, options, *, pieces):
    case = make_case(sequences, q_heads=12, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    arguments = dict.fromkeys(ScoreOptions._fields) | {"scale": 0.1} | options
    launch = (case.query, case.cache, case.batch, ScoreOptions(**arguments), torch.empty_like(case.query))
    if pieces > 1:
        triton_backend.attend_split(*launch, pieces)
    else:
        triton_backend.attend_mixed(*launch)


def newest(kernel):
    """What the last launch of `kernel` compiled."""
    return list(kernel.device_caches[0][0].values())[-1]


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
        "stack": stack,
        "mma": ptx.count("mma.sync"),
        "wgmma": ptx.count("wgmma.mma_async"),
    }


def main():
    arch = int(sys.argv[1])
    driver: Any = MadeUpDriver(arch)
    triton.runtime.driver.set_active(driver)
    reports = {}
    for name, (sequences, dtype, kv_heads, head_dim, options) in CASES.items():
        pieces = 8 if name.startswith("split") else 1
        compile_case(sequences, dtype, kv_heads, head_dim, options, pieces=pieces)
        reports[name] = describe(newest(split.attend_piece_kernel if pieces > 1 else kernels.attend_kernel))
    reports["merge"] = describe(newest(split.merge_pieces_kernel))
    key = torch.zeros(4, 3, 80, dtype=HALF)
    triton_backend.write_kv(key, key, torch.zeros(2, 2, 3, 16, 80, dtype=HALF), torch.arange(4), None)
    reports["write_kv"] = describe(newest(kernels.write_kv_kernel))
    json.dump(reports, sys.stdout)


if __name__ == "__main__":
    main()
