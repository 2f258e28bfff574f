"""The Triton back end without a GPU: interpreted for its results, compiled for its resources.

Both happen in programs of their own (see there).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagedattn.triton_backend import choose_splits
from pagedattn.triton_backend.tiles import choose_tiles

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


def test_interpreted_kernels_agree_with_the_reference():
    differences = run("interpret_kernels.py", TRITON_INTERPRET="1")
    assert len(differences) == 31
    wrong = {
        name: difference
        for name, difference in differences.items()
        if difference > (4e-3 if "fp16" in name else 1e-5)
    }
    assert wrong == {}
    assert (differences["write_kv"], differences["write_kv fp16"]) == (0, 0)


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_kernels_compile_within_the_device(arch):
    reports = run("compile_kernels.py", arch)
    assert len(reports) == 13
    for name, report in reports.items():
        assert report["cubin_bytes"] > 0, name
        assert report["shared"] <= SHARED_MEMORY[arch], name
        assert report["stack"] == 0, f"{name} spills registers"
        if "prefill" in name or "decode" in name:
            assert report["mma"] + report["wgmma"] > 0, f"{name} uses no tensor cores"
        if arch == 90 and "prefill" in name and "fp32" not in name:
            assert report["wgmma"] > 0, f"{name} uses no warp-group products"


@pytest.mark.parametrize("max_query", [1, 3, 17, 4096])
@pytest.mark.parametrize("group", [1, 3, 8, 16, 71])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", [32, 80, 256])
def test_tiles_hold_whole_queries_in_powers_of_two(max_query, group, itemsize, head_dim):
    tiles = choose_tiles(max_query=max_query, group=group, head_dim=head_dim, itemsize=itemsize)
    assert tiles.queries >= 1
    assert tiles.queries * tiles.heads <= tiles.rows
    for size in (tiles.rows, tiles.keys, tiles.head_dim):
        assert size >= 16
        assert size & (size - 1) == 0
    assert tiles.head_dim >= head_dim


def test_splits_fill_the_device_but_leave_worthwhile_pieces():
    assert choose_splits(programs=8, context=100_000, processors=132) == 33
    assert choose_splits(programs=1, context=100_000, processors=132) == 64
    assert choose_splits(programs=8, context=1024, processors=132) == 4
    assert choose_splits(programs=8, context=200, processors=132) == 1
    assert choose_splits(programs=512, context=100_000, processors=132) == 1
