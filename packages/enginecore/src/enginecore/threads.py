"""The number of compute threads, and how they wait for each other. Needs no torch.

torch computes in OpenMP threads, which wait at the end of each operation. GNU's runtime has them spin for
milliseconds first: where another program has one of their cores, each operation waits for the scheduler.
A bounded spin (`SPINS`) is as fast on a quiet machine, and gives the core away on a busy one.

The runtime reads its variables when torch is loaded, so `prepare` comes before that in every process that
computes. A variable that the user has set stays as it is.
"""

import logging
import os
import sys
from collections.abc import Collection
from pathlib import Path

from enginecore.cgroups import ROOT, groups, read_number

logger = logging.getLogger(__name__)

SPINS = 800
"""Iterations of the runtime's wait before a thread sleeps."""

_COUNT_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_WAIT_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
THREAD_VARIABLES = (*_COUNT_VARIABLES, *_WAIT_VARIABLES)

_set: dict[str, str] = {}
"""Variables that `prepare` has set in this process."""


def compute_threads(ranks: int = 1, *, root: Path = ROOT, cpus: Collection[int] | None = None) -> int:
    """Return how many threads each of `ranks` processes of this host should compute in.

    It is their share of the physical cores that the process may run on, or of the processor time that its
    control groups grant if that is less. `root` is where proc and sys are mounted; `cpus` are the logical
    processors that the process may run on, its affinity by default.
    """
    allowed = _affinity() if cpus is None else cpus
    cores = _physical_cores(allowed, root)
    granted = _granted_cpus(root)
    if granted is not None:
        cores = min(cores, int(granted))
    return max(1, cores // ranks)


def prepare(ranks: int = 1) -> None:
    """Set the number of threads of this process, one of `ranks` on this host, and their way of waiting.

    Where torch is loaded already only the number can be set, which is logged; it is never raised, so that
    a program that chose fewer threads keeps them.
    """
    wanted = _wanted(compute_threads(ranks))
    torch = sys.modules.get("torch")
    if torch is None:
        os.environ.update(wanted)
        _set.update(wanted)
        return
    count = wanted.get("OMP_NUM_THREADS")
    if count is not None and int(count) < torch.get_num_threads():
        torch.set_num_threads(int(count))
    if "GOMP_SPINCOUNT" in wanted:
        logger.info(
            "torch was loaded before the engine: it computes in %d threads, which wait as its OpenMP runtime "
            "has them wait; on a machine that does other work too, set GOMP_SPINCOUNT=%d before torch is "
            "imported",
            torch.get_num_threads(),
            SPINS,
        )


def user_environment() -> dict[str, str]:
    """Return this process's environment without what `prepare` set in it: children decide for themselves."""
    return {name: value for name, value in os.environ.items() if _set.get(name) != value}


def _wanted(count: int) -> dict[str, str]:
    """Return the variables to set, which are those of which the user has set none."""
    given = user_environment()
    wanted = {}
    if not any(name in given for name in _COUNT_VARIABLES):
        wanted["OMP_NUM_THREADS"] = str(count)
    if not any(name in given for name in _WAIT_VARIABLES):
        wanted["GOMP_SPINCOUNT"] = str(SPINS)
    return wanted


def _affinity() -> Collection[int]:
    if sys.platform == "linux":
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _physical_cores(cpus: Collection[int], root: Path) -> int:
    """Return how many cores `cpus` belong to: hyperthreads of one share its arithmetic units."""
    cores = set()
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list")
        cores.add(siblings or str(cpu))
    return max(1, len(cores))


def _granted_cpus(root: Path) -> float | None:
    """Return the least processor time a second that a control group grants; None without a limit."""
    shares = []
    for group in groups("cpu", root):
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal():
            shares.append(int(quota) / int(period))
        old_quota = read_number(group / "cpu.cfs_quota_us")
        old_period = read_number(group / "cpu.cfs_period_us")
        if old_quota is not None and old_quota > 0 and old_period:
            shares.append(old_quota / old_period)
    return min(shares, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
