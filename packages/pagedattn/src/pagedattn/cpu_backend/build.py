"""Compiles the C kernels at first use, for this CPU, and keeps them in the user's cache.

The library calls nothing of torch but its OpenMP runtime, so it builds in seconds without torch's headers.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from pagedattn.backends import BackendUnavailable

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "kernels"
CACHE_VARIABLE = "OCTAVO_CACHE"
_NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
_FLAGS = (
    "-std=gnu11",
    "-O3",
    _NATIVE,
    "-fPIC",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
)


@cache
def load_library() -> ctypes.CDLL:
    """The compiled kernels, from the cache or made now.

    Raises BackendUnavailable when there is no compiler or it fails; the message holds what it said.
    """
    compiler = _find_compiler()
    path = _cache_folder() / _key(compiler) / "kernels.so"
    if not path.exists():
        _compile(compiler, path)
    _share_openmp()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendUnavailable(f"the compiled kernels cannot be loaded: {error}") from error


@cache
def usable() -> bool:
    """Whether the kernels run here; if not, says why, once."""
    try:
        load_library()
    except BackendUnavailable as error:
        logger.warning("attention on the CPU runs on torch, which is slower: %s", error)
        return False
    return True


def _find_compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    raise BackendUnavailable(
        "there is no C compiler (CC is not set to one, and cc, gcc, clang are not in PATH)"
    )


def _cache_folder() -> Path:
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named) / "pagedattn"
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "octavo" / "pagedattn"


def _key(compiler: str) -> str:
    """Names a library by all that its bytes depend on: sources, flags, compiler, CPU."""
    digest = hashlib.sha256(repr((_FLAGS, compiler, _cpu())).encode())
    digest.update(_run([compiler, "--version"]).stdout.encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:32]


def _cpu() -> tuple[str, ...]:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return (platform.machine(), platform.processor())
    first = cpuinfo.read_text().split("\n\n")[0].splitlines()
    telling = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return (platform.machine(), *(line for line in first if line.startswith(telling)))


def _compile(compiler: str, path: Path) -> None:
    """Build beside `path` and move into place, so that processes that start together do not meet."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(dir=path.parent)
    except OSError as error:
        raise BackendUnavailable(
            f"the kernels' folder {path.parent} cannot be written ({error.strerror}); "
            f"{CACHE_VARIABLE} names another"
        ) from error
    try:
        sources = [str(source) for source in sorted(SOURCES.glob("*.c"))]
        with_openmp = _run([compiler, *_FLAGS, "-fopenmp", "-c", *sources], folder)
        if with_openmp.returncode:
            _check(_run([compiler, *_FLAGS, "-c", *sources], folder), with_openmp.stderr)
            logger.warning("%s knows no OpenMP: attention on the CPU runs on one thread", compiler)
        objects = [f"{source.stem}.o" for source in sorted(SOURCES.glob("*.c"))]
        # Without -fopenmp here: the one runtime of the process is torch's, see _share_openmp.
        _check(_run([compiler, "-shared", *objects, "-o", "kernels.so", "-lm"], folder))
        (Path(folder) / "kernels.so").replace(path)
    finally:
        shutil.rmtree(folder)


def _run(command: list[str], folder: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailable(f"{command[0]} cannot be run: {error}") from error


def _check(done: subprocess.CompletedProcess[str], said_before: str = "") -> None:
    if done.returncode:
        said = (done.stderr or said_before).strip().splitlines()
        errors = [line for line in said if "error" in line] or said
        raise BackendUnavailable(f"{done.args[0]} failed: {errors[0] if errors else done.returncode}")


def _share_openmp() -> None:
    """Let the kernels use the OpenMP runtime that torch has loaded: two would keep two sets of threads."""
    maps = Path("/proc/self/maps")
    if maps.is_file():
        loaded = {line.rpartition(" ")[2] for line in maps.read_text().splitlines()}
        found = sorted(
            path for path in loaded if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))
        )
    else:
        found = sorted(str(path) for path in (Path(torch.__file__).parent / "lib").glob("lib*omp*"))
    for path in found:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
