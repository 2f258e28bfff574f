"""The Triton kernels around attention without a GPU: interpreted for results, compiled for resources.

Both happen in programs of their own (see there).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# What one program may use of a streaming multiprocessor's shared memory.
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10}


def run(program, *arguments, **environment):
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=inherited | {"OMP_NUM_THREADS": "1"} | environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_interpreted_kernels_agree_with_the_definitions():
    reports = run("interpret_ops.py", TRITON_INTERPRET="1")
    assert len(reports) == 43
    assert {name: value for name, value in reports.items() if value > 1} == {}
    assert all(value == 0 for name, value in reports.items() if name.startswith(("sampling", "copies")))


@pytest.mark.slow
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_kernels_compile_within_the_device(arch):
    reports = run("compile_ops.py", arch)
    assert len(reports) == 21
    for name, report in reports.items():
        assert report["cubin_bytes"] > 0, name
        assert report["shared"] <= SHARED_MEMORY[arch], name
        assert report["stack"] == 0, f"{name} spills registers"
        if name.startswith("grouped"):
            assert report["mma"] + report["wgmma"] > 0, f"{name} uses no tensor cores"
