"""The tests of the C kernels on builds for other instruction sets and under sanitizers."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),  # compiles and runs all of them, some sanitized
    pytest.mark.skipif(platform.machine() != "x86_64", reason="names instruction sets of x86-64"),
]

FOLDER = Path(__file__).parent
TESTS = ("test_linear.py", "test_quantized.py", "test_cpu_ops.py", "test_capture.py", "test_experts.py")


def compiler(folder, *, instructions="native", extra=""):
    """A compiler for `instructions` in place of this machine's, with `extra` arguments."""
    script = folder / "cc"
    script.write_text(f'#!/bin/bash\nexec cc "${{@/-march=native/-march={instructions}}}" {extra}\n')
    script.chmod(0o755)
    return str(script)


def run_tests(folder, **environment):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *(str(FOLDER / name) for name in TESTS)],
        capture_output=True,
        text=True,
        cwd=FOLDER.parent.parent,
        env=inherited | {"OCTAVO_CACHE": str(folder / "cache")} | environment,
    )


def library(name):
    """Path of a library of the compiler; its bare name where there is none."""
    command = ["cc", f"-print-file-name={name}"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def has_avx2():
    return "avx2" in Path("/proc/cpuinfo").read_text().split()


@pytest.mark.parametrize(
    "instructions",
    ["x86-64", pytest.param("x86-64-v3", marks=pytest.mark.skipif(not has_avx2(), reason="no AVX2 here"))],
)
def test_other_instruction_sets(instructions, tmp_path):
    done = run_tests(tmp_path, CC=compiler(tmp_path, instructions=instructions))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert len(list(tmp_path.rglob("kernels.so"))) == 1


@pytest.mark.parametrize("sanitizer", ["address", "undefined"])
def test_sanitizers(sanitizer, tmp_path):
    extra = f"-fsanitize={sanitizer} -fno-sanitize-recover=all"
    name = {"address": "libasan.so", "undefined": "libubsan.so"}[sanitizer]
    # The C++ runtime too: the address sanitizer looks for `throw` when it is loaded, and torch throws.
    found = [library(name), library("libstdc++.so.6")]
    if not all(path.is_absolute() for path in found):
        pytest.skip(f"this compiler has no {name}")
    done = run_tests(
        tmp_path,
        CC=compiler(tmp_path, extra=extra),
        LD_PRELOAD=":".join(map(str, found)),
        ASAN_OPTIONS="detect_leaks=0",  # Python's own
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(list(tmp_path.rglob("kernels.so"))) == 1
