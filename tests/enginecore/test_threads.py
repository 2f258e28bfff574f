"""Compute threads: how many by what the process may use, and the variables that each process gets."""

import json
import os
import subprocess
import sys

import pytest

import successor_model
from enginecore.cgroups import groups
from enginecore.threads import SPINS, THREAD_VARIABLES, compute_threads

FREE = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
"""An environment in which the user has set nothing."""


@pytest.fixture
def machine(tmp_path):
    """Four cores of two hyperthreads each, n and n + 4, and no control groups."""
    for cpu in range(8):
        topology = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "core_cpus_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    return tmp_path


def member(root, lines, files):
    """Make the process a member of control groups, with files below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_thread_a_core_shared_among_the_ranks(machine):
    assert [compute_threads(ranks, root=machine, cpus=range(8)) for ranks in (1, 2, 3, 4, 9)] == [
        4,
        2,
        1,
        1,
        1,
    ]


def test_affinity_counts_cores_and_not_hyperthreads(machine):
    assert compute_threads(root=machine, cpus={0, 4}) == 1
    assert compute_threads(root=machine, cpus={0, 1, 5, 6}) == 3


def test_older_kernels_name_the_siblings_otherwise(tmp_path):
    for cpu in range(4):
        topology = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}\n")
    assert compute_threads(root=tmp_path, cpus=range(4)) == 2


def test_where_nothing_is_known_of_cores_each_processor_counts(tmp_path):
    assert compute_threads(root=tmp_path, cpus=range(6)) == 6


@pytest.mark.parametrize(
    ("lines", "files", "threads"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "350000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "20000 100000\n"}, 1),
        # Above the process's own group, and below the root.
        (
            "0::/jobs/job_7/step_0\n",
            {"jobs/job_7/cpu.max": "100000 50000\n", "jobs/job_7/step_0/cpu.max": "max 100000\n"},
            2,
        ),
        (
            "0::/user.slice/a\n",
            {"user.slice/cpu.max": "300000 100000\n", "user.slice/a/cpu.max": "100000 100000\n"},
            1,
        ),
        # Version 1, on its own and beside version 2; -1 is no limit.
        (
            "4:cpu,cpuacct:/docker/x\n",
            {"cpu/docker/x/cpu.cfs_quota_us": "300000\n", "cpu/docker/x/cpu.cfs_period_us": "100000\n"},
            3,
        ),
        (
            "4:cpu:/a\n0::/\n",
            {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            4,
        ),
        # A container sees its own group as the root, though it is told of the host's path.
        (
            "4:cpu:/docker/0123\n",
            {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            2,
        ),
        ("0::/../../other\n", {"cpu.max": "200000 100000\n"}, 2),
    ],
)
def test_the_least_that_a_control_group_grants(machine, lines, files, threads):
    member(machine, lines, files)
    assert compute_threads(root=machine, cpus=range(8)) == threads


def test_groups_from_the_own_to_the_root(tmp_path):
    member(tmp_path, "0::/a/b\n", {"a/b/memory.max": "1\n"})
    mounted = tmp_path / "sys/fs/cgroup"
    assert groups("memory", tmp_path) == [mounted / "a/b", mounted / "a", mounted]


PREPARED = """
import json, os, sys
from enginecore.threads import THREAD_VARIABLES, prepare, user_environment
prepare()
import torch
here = {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}
children = {name: user_environment()[name] for name in THREAD_VARIABLES if name in user_environment()}
print(json.dumps([here, torch.get_num_threads(), children]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, {"OMP_NUM_THREADS", "GOMP_SPINCOUNT"}),
        ({"OMP_NUM_THREADS": "1"}, {"GOMP_SPINCOUNT"}),
        ({"MKL_NUM_THREADS": "1"}, {"GOMP_SPINCOUNT"}),
        ({"OMP_WAIT_POLICY": "passive"}, {"OMP_NUM_THREADS"}),
        ({"GOMP_SPINCOUNT": "7"}, {"OMP_NUM_THREADS"}),
        ({"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "active"}, set()),
    ],
)
def test_what_the_user_has_set_stays_and_children_decide_for_themselves(given, added):
    done = subprocess.run(
        [sys.executable, "-c", PREPARED], env=FREE | given, capture_output=True, text=True, check=True
    )
    here, threads, children = json.loads(done.stdout)
    assert {name: here[name] for name in given} == given
    assert set(here) == set(given) | added
    assert threads == (1 if "1" in given.values() else compute_threads())
    assert children == given


LOADED_BEFORE = """
import logging
logging.basicConfig(level=logging.INFO)
import torch
torch.set_num_threads({before})
from enginecore import threads
threads.compute_threads = lambda ranks: 2
threads.prepare()
print(torch.get_num_threads())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 1)])
def test_where_torch_is_loaded_only_the_number_is_lowered_and_a_line_says_so(before, after):
    program = LOADED_BEFORE.format(before=before)
    done = subprocess.run(
        [sys.executable, "-c", program], env=FREE, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(after)]
    assert f"torch was loaded before the engine: it computes in {after} threads" in done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return successor_model.write(tmp_path_factory.mktemp("threads") / "model")


IN_ONE_PROCESS = """
import os, sys
from enginecore import LLM
llm = LLM(sys.argv[1], device="cpu", num_blocks_override=8)
print(os.environ["OMP_NUM_THREADS"], os.environ["GOMP_SPINCOUNT"], sys.modules["torch"].get_num_threads())
"""


@pytest.mark.slow
def test_an_engine_in_the_caller_s_process_sets_them_before_torch_is_loaded(model):
    done = subprocess.run(
        [sys.executable, "-c", IN_ONE_PROCESS, str(model)],
        env=FREE,
        capture_output=True,
        text=True,
        check=True,
    )
    count, spins, threads = done.stdout.split()
    assert (int(count), int(threads)) == (compute_threads(), compute_threads())
    assert 0 < int(spins) < 300_000


WATCH = """
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            with open(os.path.join(os.environ["WATCHED"], str(os.getpid())), "w") as file:
                argument = next((a for a in sys.orig_argv if a.startswith("enginecore.")), "caller")
                names = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT")
                file.write(" ".join([argument, *(os.environ.get(name, "-") for name in names)]))
sys.meta_path.insert(0, Watch())
"""
"""A sitecustomize module: each process writes down its variables when it loads torch."""

IN_OTHERS = """
import asyncio, sys
from enginecore import AsyncEngine
from enginecore.config import make_config
config = {"model": sys.argv[1], "tensor_parallel_size": sys.argv[2]}
async def start():
    engine = AsyncEngine(make_config({"device": "cpu", "num_blocks_override": 8, **config}))
    try:
        await engine.ready()
    finally:
        await engine.shutdown()
asyncio.run(start())
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("given", [{}, {"OMP_NUM_THREADS": "3", "GOMP_SPINCOUNT": "5"}])
def test_core_and_workers_set_them_before_torch_is_loaded(model, tmp_path, ranks, given):
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    written = tmp_path / "written"
    written.mkdir()
    watched = {"PYTHONPATH": str(tmp_path), "WATCHED": str(written)}
    subprocess.run(
        [sys.executable, "-c", IN_OTHERS, str(model), str(ranks)],
        env=FREE | given | watched,
        check=True,
        timeout=120,
    )
    found = sorted(path.read_text().split() for path in written.iterdir())
    assert [module for module, _, _ in found] == (
        ["enginecore.core.process"] if ranks == 1 else ["enginecore.worker.process"] * 2
    )
    for _, count, spins in found:
        assert int(count) == (3 if given else compute_threads(ranks))
        assert int(spins) == (5 if given else SPINS)
