"""git and uv on one uv.lock, in a clone: tools/lock.py setup makes `git status` clean and keeps it so.

uv is played by a program that does what the real one does to a stripped lock: it puts its index's address in.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "lock.py"
UV = r"""#!/bin/sh
[ -n "$NO_INDEX" ] && exit 2
sed -i -e 's#https://index.invalid/simple#https://an.index/simple#' \
    -e 's#https://index.invalid/#https://files.an.index/ab/cd/#' \
    -e 's#^requires-python = ">=3.11"#requires-python = ">=3.11, <3.14"#' uv.lock
"""
LOCK = """version = 1
requires-python = ">=3.11"

[[package]]
name = "numpy"
version = "{version}"
source = {{ registry = "https://index.invalid/simple" }}
sdist = {{ url = "https://index.invalid/numpy-{version}.tar.gz", hash = "sha256:0" }}
"""


@pytest.fixture
def environment(tmp_path, monkeypatch):
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "uv").write_text(UV)
    (programs / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, "/dev/null")
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "A")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "a@example.invalid")


def run(folder, *command):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def origin(tmp_path, environment):
    folder = tmp_path / "origin"
    (folder / "tools").mkdir(parents=True)
    shutil.copy(TOOL, folder / "tools")
    (folder / ".gitattributes").write_text("uv.lock filter=hostfree-lock\n")
    (folder / "pyproject.toml").write_text('[project]\nname = "x"\n')
    (folder / "uv.lock").write_text(LOCK.format(version="1.26.0"))
    run(folder, "git", "init", "--quiet", "--initial-branch", "main")
    commit(folder)
    return folder


def commit(folder):
    run(folder, "git", "add", "--all")
    run(folder, "git", "commit", "--quiet", "--message", "x")


@pytest.fixture
def clone(origin, tmp_path):
    run(tmp_path, "git", "clone", "--quiet", str(origin), "clone")
    return tmp_path / "clone"


def status(folder):
    return run(folder, "git", "status", "--porcelain")


def synchronise(folder):
    """What `uv sync` and `uv run` do to the lock."""
    run(folder, "uv", "lock")
    return (folder / "uv.lock").read_text()


def test_status_is_clean_after_setup_whenever_it_is_called(clone):
    synchronise(clone)
    assert status(clone) == " M uv.lock\n"
    run(clone, "python3", "tools/lock.py", "setup")
    assert status(clone) == ""
    assert "https://an.index/simple" in synchronise(clone)
    assert status(clone) == ""
    run(clone, "python3", "tools/lock.py", "setup")
    assert status(clone) == ""


def test_a_pull_brings_a_lock_that_uv_need_not_touch(clone, origin):
    run(clone, "python3", "tools/lock.py", "setup")
    (origin / "uv.lock").write_text(LOCK.format(version="2.3.5"))
    commit(origin)
    run(clone, "git", "pull", "--quiet")
    before = (clone / "uv.lock").read_text()
    assert "https://files.an.index/ab/cd/numpy-2.3.5.tar.gz" in before
    assert status(clone) == "" and synchronise(clone) == before


def test_a_changed_dependency_is_committed_without_addresses(clone):
    run(clone, "python3", "tools/lock.py", "setup")
    full = (clone / "uv.lock").read_text()
    (clone / "uv.lock").write_text(full.replace("1.26.0", "2.3.5"))
    run(clone, "python3", "tools/lock.py", "setup")  # is not taken for an order to stage it
    assert status(clone) == " M uv.lock\n"
    commit(clone)
    assert run(clone, "git", "show", "HEAD:uv.lock") == LOCK.format(version="2.3.5")
    assert status(clone) == ""


def test_without_an_index_the_lock_is_checked_out_as_it_is(clone, origin, monkeypatch):
    run(clone, "python3", "tools/lock.py", "setup")
    (origin / "uv.lock").write_text(LOCK.format(version="2.3.5"))
    commit(origin)
    monkeypatch.setenv("NO_INDEX", "1")
    run(clone, "git", "pull", "--quiet")
    assert (clone / "uv.lock").read_text() == LOCK.format(version="2.3.5")
    assert status(clone) == ""


def test_a_commit_whose_tool_cannot_fill_can_be_checked_out(clone, origin):
    (origin / "tools" / "lock.py").write_text(
        'import sys\nif sys.argv[1:] != ["strip"]:\n    sys.exit(2)\nsys.stdout.write(sys.stdin.read())\n'
    )
    (origin / "uv.lock").write_text(LOCK.format(version="2.3.5"))
    commit(origin)
    run(clone, "python3", "tools/lock.py", "setup")
    run(clone, "git", "pull", "--quiet")
    assert (clone / "uv.lock").read_text() == LOCK.format(version="2.3.5")


def test_without_setup_the_lock_is_given_up_before_a_pull(clone, origin):
    synchronise(clone)
    (origin / "uv.lock").write_text(LOCK.format(version="2.3.5"))
    commit(origin)
    refused = subprocess.run(["git", "pull", "--quiet"], cwd=clone, capture_output=True, text=True)
    assert refused.returncode != 0 and "uv.lock" in refused.stderr
    run(clone, "git", "restore", "uv.lock")
    run(clone, "git", "pull", "--quiet")
    assert status(clone) == ""
