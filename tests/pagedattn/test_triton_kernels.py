"""The Triton kernels without a GPU: interpreted for their results, compiled for their resources.

Both happen in programs of their own (see there).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

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


TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2}


def test_interpreted_attention_agrees_with_the_reference():
    reports = run("interpret_kernels.py", TRITON_INTERPRET="1")
    assert len(reports["close"]) == 47
    wrong = {}
    for name, difference in reports["close"].items():
        dtype = next((dtype for dtype in TOLERANCE if dtype in name), None)
        if difference > TOLERANCE.get(dtype, 1e-5):
            wrong[name] = difference
    assert wrong == {}
    assert set(reports["exact"].values()) == {0}


def test_decode_steps_captured_with_their_launches_agree_with_plain_ones():
    reports = run("interpret_graphs.py", TRITON_INTERPRET="1", OCTAVO_ATTENTION_BACKEND="triton")
    assert len(reports) == 16
    for name, report in reports.items():
        assert report["difference"] <= 1e-5, name
        assert report["as_expected"], f"{name}: another graph than the smallest"
        prompts = name.startswith(("prompts", "a mixed step"))
        assert (report["calls"], report["replays"]) == ((1, 0) if prompts else (0, 1)), name


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_attention_compiles_within_the_device(arch):
    reports = run("compile_kernels.py", arch)
    assert len(reports) == 24
    for name, report in reports.items():
        assert report["cubin_bytes"] > 0, name
        assert report["shared"] <= SHARED_MEMORY[arch], name
        assert report["stack"] == 0, f"{name} spills registers"
        kind, dtype = name.split()[:2] if name != "merge" else ("merge", "fp32")
        if kind in ("merge", "write_kv"):
            continue
        head_dim = int(name.split()[2])
        if (dtype, head_dim) != ("fp32", 256):  # see softmax.accumulate
            assert report["mma"] + report["wgmma"] > 0, f"{name} uses no tensor cores"
        assert report["async_copies"] > 0, f"{name} does not copy 16 bytes at a time behind its products"
        if arch == 90 and kind in ("prefill", "mixed", "cascade") and dtype in ("fp16", "bf16"):
            assert report["wgmma"] > 0, f"{name} uses no warp-group products"
        if kind == "prefill":
            assert report["divisions"] == 0, f"{name} divides integers"


def test_interpreted_ops_agree_with_their_definitions():
    reports = run("interpret_ops.py", TRITON_INTERPRET="1")
    assert len(reports) == 48
    assert {name: value for name, value in reports.items() if value > 1} == {}
    assert all(
        value == 0 for name, value in reports.items() if name.startswith(("sampling", "copies", "bitmask"))
    )


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_ops_compile_within_the_device(arch):
    reports = run("compile_ops.py", arch)
    assert len(reports) == 23
    for name, report in reports.items():
        assert report["cubin_bytes"] > 0, name
        assert report["shared"] <= SHARED_MEMORY[arch], name
        assert report["stack"] == 0, f"{name} spills registers"
        if name.startswith("grouped"):
            assert report["mma"] + report["wgmma"] > 0, f"{name} uses no tensor cores"
