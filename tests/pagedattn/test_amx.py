"""AMX: what is compiled for it, and the products of its emulation, in programs of their own.

`test_cpu_targets` runs the tests of all linear layers with the emulation.
"""

import os
import platform
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from linear_cases import BFLOAT, numbers

from pagedattn.cpu_backend.build import SOURCES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),  # compiles all kernels
    pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is of x86-64"),
]

AMX_SOURCES = ("amx.c", "amx_start.c", "linear.c")


def compile_source(folder, name, *flags):
    """Compile a source as for the library; return what a disassembler makes of it."""
    made = folder / f"{name}.o"
    command = ["cc", "-std=gnu11", "-O3", "-fPIC", "-Wall", "-Wextra", "-Werror", *flags]
    done = subprocess.run(
        [*command, "-c", str(SOURCES / name), "-o", str(made)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    listing = subprocess.run(["objdump", "-d", str(made)], capture_output=True, text=True, check=True)
    return listing.stdout


def compiles(*flags):
    """Whether compiler and assembler know what the flags name."""
    command = ["cc", *flags, "-x", "c", "-c", "-", "-o", os.devnull]
    return subprocess.run(command, input="", text=True, capture_output=True).returncode == 0


@pytest.mark.skipif(not compiles("-march=sapphirerapids"), reason="the compiler knows no AMX")
def test_kernels_compile_for_amx(tmp_path):
    listings = {name: compile_source(tmp_path, name, "-march=sapphirerapids") for name in AMX_SOURCES}
    for instruction in ("ldtilecfg", "tdpbf16ps", "tdpbusd", "tilestored", "tilerelease"):
        assert instruction in listings["amx.c"]
    for name in AMX_SOURCES:
        assert "tmm" not in compile_source(tmp_path, name, "-march=sapphirerapids", "-DNO_AMX")


@pytest.mark.skipif(not compiles("-mavxvnni"), reason="the compiler knows no AVX-VNNI")
def test_kernels_compile_for_avx_vnni(tmp_path):
    listing = compile_source(tmp_path, "linear.c", "-march=x86-64-v3", "-mavxvnni")
    products = [line for line in listing.splitlines() if "vpdpbusd" in line]
    # The first byte of a VEX prefix of three; EVEX, which these CPUs do not have, begins with 62.
    assert products
    assert {line.split("\t")[1].split()[0] for line in products} == {"c4"}


PRODUCT = """
import logging, sys, torch
from pagedattn import linear, pack_linear
logging.basicConfig(level=logging.INFO, format="%(message)s")
x, weight = torch.load(sys.argv[1])
torch.save(linear(x, pack_linear(weight, backend="cpu"), backend="cpu"), sys.argv[2])
"""


def product(folder, x, weight, sources=None):
    """The product by a program with emulated tiles, and what it logged."""
    compiler = folder / "cc"
    compiler.write_text('#!/bin/sh\nexec cc "$@" -DEMULATE_AMX\n')
    compiler.chmod(0o755)
    torch.save((x, weight), folder / "given")
    program = PRODUCT
    if sources is not None:
        program = f"""
from pathlib import Path
from pagedattn.cpu_backend import build
build.SOURCES = Path({str(sources)!r})
{PRODUCT}"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder / "given"), str(folder / "made")],
        capture_output=True,
        text=True,
        env=os.environ | {"CC": str(compiler), "OCTAVO_CACHE": str(folder / "cache")},
    )
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "made"), done.stderr


def sums_of_tiles(x, weight):
    """TDPBF16PS as the SDM describes it, over 16 words of two inputs each, by numpy.

    A product of two bfloat16 is a float32, so a multiply-add rounds once, as the addition here.
    """
    inputs = x.shape[1]
    x, weight = (np.pad(a.float().numpy(), ((0, 0), (0, -inputs % 32))) for a in (x, weight))
    total = np.zeros((len(x), len(weight)), np.float32)
    for tile in range(0, x.shape[1], 32):
        first, second = np.zeros_like(total), np.zeros_like(total)
        for k in range(tile, tile + 32, 2):
            first += x[:, k, None] * weight[:, k]
            second += x[:, k + 1, None] * weight[:, k + 1]
        total += first + second
    return torch.from_numpy(total).bfloat16()


def test_sums_are_those_of_the_instruction(tmp_path):
    x, weight = numbers(45, 331, dtype=BFLOAT), numbers(77, 331, dtype=BFLOAT, seed=1)
    result, said = product(tmp_path, x, weight)
    assert "matrix products on the CPU use AMX" in said
    assert torch.equal(result, sums_of_tiles(x, weight))


@pytest.mark.parametrize(
    ("broken", "by", "reason"),
    [
        # Weights of the neighbouring word.
        ("bfloat16_at(columns, 2 * n)", "bfloat16_at(columns, 2 * n + 1)", "bfloat16"),
        # Bytes of x with a sign.
        ("registers.data[x][m][4 * k + i] *", "(int8_t)registers.data[x][m][4 * k + i] *", "integers"),
        # Sums of single rows that are added in another order.
        (
            "sum = flush(flush(sum) + flush(first + second));",
            "sum = registers.config.rows[sums] == 1 ? sum + first + second : sum + (first + second);",
            "beside it",
        ),
    ],
    ids=["bfloat16", "integers", "rows"],
)
def test_tiles_that_are_wrong_are_found_and_not_used(broken, by, reason, tmp_path):
    sources = tmp_path / "kernels"
    shutil.copytree(SOURCES, sources)
    emulation = sources / "amx_emulation.h"
    text = emulation.read_text()
    assert text.count(broken) == 1
    emulation.write_text(text.replace(broken, by))
    x, weight = numbers(20, 70, dtype=BFLOAT), numbers(40, 70, dtype=BFLOAT, seed=1)
    result, said = product(tmp_path, x, weight, sources)
    assert "vectors in place of AMX" in said
    assert reason in said
    exact = x.double() @ weight.double().T
    assert ((result.double() - exact).abs() <= 2.0**-7 * exact.abs() + 1e-4).all()


MISUSE = """
#include "amx_tiles.h"
int main(void) {{
    static char memory[1024];
    TileConfig config = {{.palette = 1}};
    for (int tile = 0; tile < 3; tile++) config.rows[tile] = 16, config.row_bytes[tile] = 64;
    {}
    return 0;
}}
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("TILE_CONFIGURE(&config); TILE_LOAD(1, memory, 64); TILE_RELEASE();", None),
        ("TILE_LOAD(1, memory, 64);", "without a configuration"),
        ("TILE_CONFIGURE(&config); TILE_RELEASE(); TILE_ZERO(0);", "without a configuration"),
        ("TILE_CONFIGURE(&config); TILE_STORE(3, memory, 64);", "no size"),
        ("config.rows[1] = 17; TILE_CONFIGURE(&config);", "larger than its register"),
        ("config.rows[8] = config.row_bytes[8] = 1; TILE_CONFIGURE(&config);", "there are 8 tiles"),
        ("config.rows[1] = 8; TILE_CONFIGURE(&config); TILE_DOT_BYTES(0, 1, 2);", "differ in rows"),
        ("config.rows[2] = 8; TILE_CONFIGURE(&config); TILE_DOT_BFLOAT16(0, 1, 2);", "differ in inputs"),
        ("config.row_bytes[2] = 32; TILE_CONFIGURE(&config); TILE_DOT_BYTES(0, 1, 2);", "differ in columns"),
        ("TILE_CONFIGURE(&config); TILE_DOT_BYTES(0, 1, 1);", "three tiles"),
    ],
)
def test_the_emulation_ends_a_program_where_the_cpu_would(body, said, tmp_path):
    source, program = tmp_path / "misuse.c", tmp_path / "misuse"
    source.write_text(MISUSE.format(body))
    command = ["cc", "-std=gnu11", "-DEMULATE_AMX", f"-I{SOURCES}", str(source), "-o", str(program), "-lm"]
    subprocess.run(command, check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert (done.returncode == 0) == (said is None)
    assert (said or "") in done.stderr
