"""Compiles the C kernels at first use, for this CPU (see `instructions`), and keeps them in the user's cache.

The library calls nothing of torch but its OpenMP runtime, so it builds in seconds without torch's headers.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from pagedattn.backends import BackendUnavailable
from pagedattn.cpu_backend.instructions import compiler_flags, start_amx

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "kernels"
CACHE_VARIABLE = "OCTAVO_CACHE"
_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
)


@cache
def load_library() -> ctypes.CDLL:
    """The compiled kernels, from the cache or made now.

    Raises BackendUnavailable when there is no compiler or it fails; the message holds what it said. Raises
    ValueError where OCTAVO_CPU_INSTRUCTIONS asks for what cannot be.
    """
    library = _load()
    start_amx(library)
    return library


def _load() -> ctypes.CDLL:
    cache_folder = _cache_folder()
    path = None if cache_folder is None else cache_folder / _key() / "kernels.so"
    _share_openmp()
    if path is not None and os.access(path, os.R_OK):
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            logger.warning("the kernels are compiled again, since those of before do not load: %s", error)
    compiler = _find_compiler()
    try:
        if path is None:
            raise OSError("there is no home directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        return _compile(compiler, path.parent, path)
    except OSError as error:
        logger.warning(
            "the kernels of attention on the CPU are compiled anew by each process, as they cannot be kept "
            "(%s); %s names a folder for them",
            error,
            CACHE_VARIABLE,
        )
    try:
        return _compile(compiler, Path(tempfile.gettempdir()), None)
    except OSError as error:
        raise BackendUnavailable(f"there is nowhere to compile the kernels: {error}") from error


@cache
def usable() -> bool:
    """Whether the kernels run here; if not, says why, once."""
    try:
        load_library()
    except BackendUnavailable as error:
        logger.warning("attention on the CPU runs on torch, which is slower: %s", error)
        return False
    return True


def _cache_folder() -> Path | None:
    """Return the folder of compiled kernels; None where the user has no home directory."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named) / "pagedattn"
    caches = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(caches) if caches else Path.home() / ".cache") / "octavo" / "pagedattn"
    except RuntimeError:
        return None


def _key() -> str:
    """Names a library by sources, flags and CPU; whichever compiler made it will do."""
    digest = hashlib.sha256(repr((_FLAGS, compiler_flags(), _cpu())).encode())
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


def _find_compiler() -> list[str]:
    asked = shlex.split(os.environ.get("CC", ""))
    if asked and shutil.which(asked[0]):
        return asked
    if asked:
        logger.warning("CC asks for %s, which is not in PATH; looking for another compiler", asked[0])
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise BackendUnavailable(
        "there is no C compiler (CC is not set to one, and cc, gcc, clang are not in PATH)"
    )


def _compile(compiler: list[str], parent: Path, path: Path | None) -> ctypes.CDLL:
    """Build in a folder of its own in `parent`, load the kernels, and move them to `path`, if one is given.

    Processes that start together do not meet, and none finds kernels that are half written or do not load.

    Raises OSError when nothing can be written, BackendUnavailable when the kernels do not compile or load.
    """
    folder = tempfile.mkdtemp(dir=parent)
    try:
        sources = sorted(SOURCES.glob("*.c"))
        commands = [[*compiler, *_FLAGS, *compiler_flags(), "-c", str(source)] for source in sources]
        failed = _run([[*command, "-fopenmp"] for command in commands], folder)
        if failed:
            _check(_run(commands, folder), failed)
            logger.warning("%s knows no OpenMP: attention on the CPU runs on one thread", compiler[0])
        objects = [f"{source.stem}.o" for source in sources]
        # Without -fopenmp here: the one runtime of the process is torch's, see _share_openmp.
        _check(_run([[*compiler, "-shared", *objects, "-o", "kernels.so", "-lm"]], folder))
        made = Path(folder) / "kernels.so"
        try:
            library = ctypes.CDLL(str(made))
        except OSError as error:
            raise BackendUnavailable(f"the compiled kernels cannot be loaded: {error}") from error
        if path is not None:
            made.replace(path)
        return library
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(commands: Sequence[list[str]], folder: str) -> str | None:
    """Run commands side by side; what the first that failed said, or None."""
    try:
        running = [
            subprocess.Popen(
                command, cwd=folder, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            for command in commands
        ]
    except OSError as error:
        return str(error)
    said = [process.communicate()[1] for process in running]
    for command, process, text in zip(commands, running, said):
        if process.returncode:
            lines = text.strip().splitlines()
            errors = [line for line in lines if "error" in line] or lines or [f"status {process.returncode}"]
            return f"{command[0]} failed: {errors[0]}"
    return None


def _check(failed: str | None, failed_before: str | None = None) -> None:
    if failed:
        raise BackendUnavailable(failed_before or failed)


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
