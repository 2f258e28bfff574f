"""Free memory by the control groups of a process, wherever their limits stand."""

import os
import shutil
import subprocess
import sys

import psutil
import pytest

import successor_model
from enginecore.worker.runner.kv_sizing import free_memory

MIB = 1 << 20


@pytest.fixture
def member(tmp_path):
    """Make the process a member of a control group, with files below /sys/fs/cgroup."""

    def make(lines, files):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(lines)
        for name, text in files.items():
            path = tmp_path / "sys/fs/cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return tmp_path

    return make


UNIT = {
    "system.slice/llm.service/memory.max": 768 * MIB,
    "system.slice/llm.service/memory.current": 68 * MIB,
    "system.slice/memory.max": "max",
    "system.slice/memory.current": 300 * MIB,
}
JOB = {
    "jobs/job_7/memory.max": 768 * MIB,
    "jobs/job_7/memory.current": 168 * MIB,
    "jobs/job_7/step_0/memory.max": "max",
    "jobs/job_7/step_0/memory.current": 1 * MIB,
    "jobs/job_7/step_0/task_0/memory.max": "max",
    "jobs/job_7/step_0/task_0/memory.current": 1 * MIB,
}
FULL_OF_PAGES = {
    "memory.max": 2048 * MIB,
    "memory.current": 2048 * MIB - 4096,
    "memory.stat": f"anon 4096\nfile {1900 * MIB}\ninactive_file {1800 * MIB}\nactive_file 0",
}
SLOWED = {"a/memory.high": 100 * MIB, "a/memory.max": 500 * MIB, "a/memory.current": 40 * MIB}
VERSION_1 = {
    "memory/a/memory.limit_in_bytes": 512 * MIB,
    "memory/a/memory.usage_in_bytes": 500 * MIB,
    "memory/a/memory.stat": f"inactive_file 0\ntotal_inactive_file {488 * MIB}",
    "memory/memory.limit_in_bytes": 9223372036854771712,
    "memory/memory.usage_in_bytes": 5000 * MIB,
}


@pytest.mark.parametrize(
    ("lines", "files", "free"),
    [
        ("0::/system.slice/llm.service\n", UNIT, 700 * MIB),
        ("0::/jobs/job_7/step_0/task_0\n", JOB, 600 * MIB),
        ("0::/\n", FULL_OF_PAGES, 1800 * MIB + 4096),
        ("0::/a\n", SLOWED, 60 * MIB),
        ("9:memory:/a\n0::/\n", VERSION_1, 500 * MIB),
        ("0::/\n", {"memory.max": 64 * MIB, "memory.current": 65 * MIB}, 0),
    ],
)
def test_the_least_that_a_group_on_the_way_to_the_root_leaves(member, lines, files, free):
    assert free_memory(member(lines, files)) == free


def test_without_limits_it_is_the_machine_s(member, monkeypatch):
    available = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    root = member("0::/a\n", {"a/memory.max": "max", "a/memory.current": 7})
    assert free_memory(root) == available.available


START = """
import sys
from enginecore import LLM
print(LLM(sys.argv[1], device="cpu", dtype="float32").llm_engine.limits.num_blocks)
"""

SWAPPED = """
mount --bind "$1" /sys/fs/cgroup && mount --bind "$2" /proc/$$/cgroup && exec "$3" -c "$4" "$5"
"""


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs to mount over /sys/fs/cgroup"
)
@pytest.mark.parametrize(
    ("lines", "files", "most"),
    [("0::/jobs/job_7/step_0/task_0\n", JOB, 600), ("0::/\n", FULL_OF_PAGES, 1801)],
)
def test_an_engine_keeps_to_it(member, lines, files, most, tmp_path):
    model = successor_model.write(tmp_path / "model")
    root = member(lines, files)
    mounted = [str(root / "sys/fs/cgroup"), str(root / "proc/self/cgroup")]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", SWAPPED, "sh", *mounted, sys.executable, START, str(model)],
        capture_output=True,
        text=True,
    )
    if "mount:" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    # 16 tokens, 1 layer, keys and values of 5 heads of 64 in float32.
    block = 16 * 2 * 5 * 64 * 4
    assert 16 * MIB <= int(done.stdout) * block <= 0.5 * most * MIB
