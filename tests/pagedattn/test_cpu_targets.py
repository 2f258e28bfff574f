"""The tests of the C kernels on builds for other instruction sets and under sanitizers."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from pagedattn.cpu_backend.instructions import cpu_flags

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),  # compiles and runs all of them, some sanitized
    pytest.mark.skipif(platform.machine() != "x86_64", reason="names instruction sets of x86-64"),
]

FOLDER = Path(__file__).parent
TESTS = ("test_linear.py", "test_quantized.py", "test_cpu_ops.py", "test_capture.py", "test_experts.py")


def compiler(folder, *, instructions="native", extra="", sanitizer="", sanitized="*"):
    """A compiler for `instructions` in place of this machine's, with `extra` arguments.

    The sanitizer is for commands that match the patterns `sanitized` of the shell. The compiler itself does
    without the one that is loaded for the kernels.
    """
    script = folder / "cc"
    script.write_text(f"""#!/bin/bash
unset LD_PRELOAD
case "$*" in {sanitized}) set -- "$@" {sanitizer};; esac
exec cc "${{@/-march=native/-march={instructions}}}" {extra}
""")
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


def needs(flag):
    return pytest.mark.skipif(flag not in cpu_flags(), reason=f"no {flag} here")


EMULATION = "-DEMULATE_AMX"


@pytest.mark.parametrize(
    ("instructions", "extra"),
    [
        ("x86-64", ""),
        pytest.param("x86-64-v3", "", marks=needs("avx2")),
        pytest.param("x86-64-v3", "-mavxvnni", marks=needs("avx_vnni")),
        ("x86-64", EMULATION),
        ("native", EMULATION),
        pytest.param("native", "", marks=needs("amx_tile")),
        pytest.param("native", "-DNO_AMX", marks=needs("amx_tile")),
    ],
)
def test_other_instruction_sets(instructions, extra, tmp_path):
    done = run_tests(tmp_path, CC=compiler(tmp_path, instructions=instructions, extra=extra))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert len(list(tmp_path.rglob("kernels.so"))) == 1


@pytest.mark.parametrize("emulation", ["", EMULATION], ids=["native", "emulated"])
@pytest.mark.parametrize("sanitizer", ["address", "undefined"])
def test_sanitizers(sanitizer, emulation, tmp_path):
    # With emulated tiles, what they do not change is sanitized by the other run.
    script = compiler(
        tmp_path,
        extra=emulation,
        sanitizer=f"-fsanitize={sanitizer} -fno-sanitize-recover=all",
        sanitized="*/amx*.c*|*/linear.c*" if emulation else "*",
    )
    name = {"address": "libasan.so", "undefined": "libubsan.so"}[sanitizer]
    # The C++ runtime too: the address sanitizer looks for `throw` when it is loaded, and torch throws.
    found = [library(name), library("libstdc++.so.6")]
    if not all(path.is_absolute() for path in found):
        pytest.skip(f"this compiler has no {name}")
    done = run_tests(
        tmp_path,
        CC=script,
        LD_PRELOAD=":".join(map(str, found)),
        ASAN_OPTIONS="detect_leaks=0",  # Python's own
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(list(tmp_path.rglob("kernels.so"))) == 1
