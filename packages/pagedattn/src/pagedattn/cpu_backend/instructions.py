"""The instruction set that the C kernels are compiled for, and the start of AMX."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from functools import cache
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

INSTRUCTIONS_VARIABLE = "OCTAVO_CPU_INSTRUCTIONS"
_ARM = platform.machine() in ("aarch64", "arm64")
_NATIVE = "-mcpu=native" if _ARM else "-march=native"


class _InstructionSet(NamedTuple):
    """Flags of the compiler, and flags of the CPU without which they make no sense."""

    compiler: tuple[str, ...]
    cpu: frozenset[str]


_SETS = {
    "amx": _InstructionSet((_NATIVE,), frozenset({"amx_tile", "amx_bf16", "amx_int8"})),
    "avx512": _InstructionSet((_NATIVE, "-DNO_AMX"), frozenset({"avx512f"})),
    "avx2": _InstructionSet(("-march=x86-64-v3",), frozenset({"avx2", "fma", "f16c"})),
    "plain": _InstructionSet(("-march=x86-64",), frozenset()),
}

_IN_USE = 1
# By the numbers of kernels/amx_start.c.
_WHY_NOT = {
    0: "the compiler knows no AMX",
    2: "the system does not permit it to this process",
    3: "there was no memory to try it",
    4: "its products of bfloat16 are not those of vectors",
    5: "its products of integers are not those of vectors",
    6: "a row's sums depend on the rows beside it",
}


def compiler_flags() -> tuple[str, ...]:
    """Return what tells the compiler which instructions to use: all that this CPU has, or those asked for.

    Raises ValueError if OCTAVO_CPU_INSTRUCTIONS names a set that is unknown or that this CPU does not have.
    """
    name = _requested()
    if name is None:
        return (_NATIVE,)
    chosen, flags = _SETS[name], cpu_flags()
    missing = chosen.cpu - flags
    if missing:
        raise ValueError(
            f"{INSTRUCTIONS_VARIABLE} asks for {name}, but this CPU, or the system on it, has no "
            f"{', '.join(sorted(missing))}"
        )
    return (*chosen.compiler, "-mavxvnni") if name == "avx2" and "avx_vnni" in flags else chosen.compiler


def start_amx(library: ctypes.CDLL) -> bool:
    """Have the kernels use AMX if they were compiled for it, the system permits it, and products are right.

    Return whether they do. Raises ValueError if they do not and OCTAVO_CPU_INSTRUCTIONS asks for it.
    """
    outcome = library.octavo_start_amx()
    if outcome == _IN_USE:
        logger.info("matrix products on the CPU use AMX")
        return True
    if _requested() == "amx":
        raise ValueError(f"{INSTRUCTIONS_VARIABLE} asks for amx, but {_WHY_NOT[outcome]}")
    if outcome:
        logger.warning("matrix products on the CPU use vectors in place of AMX: %s", _WHY_NOT[outcome])
    return False


@cache
def cpu_flags() -> frozenset[str]:
    """Return the instruction sets that /proc/cpuinfo names; none where there is no such file."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return frozenset()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _requested() -> str | None:
    name = os.environ.get(INSTRUCTIONS_VARIABLE)
    if not name:
        return None
    if _ARM:
        raise ValueError(f"{INSTRUCTIONS_VARIABLE} is of x86-64 only; on this CPU there is no choice")
    if name not in _SETS:
        raise ValueError(f"{INSTRUCTIONS_VARIABLE} is one of {', '.join(_SETS)}, not {name!r}")
    return name
