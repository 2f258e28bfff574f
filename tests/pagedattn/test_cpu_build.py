"""Compiling and loading the C kernels; in programs of their own, since a process loads them once."""

import os
import subprocess
import sys

import pytest
import torch

from pagedattn import BackendUnavailable, backend_name

pytestmark = pytest.mark.slow

ATTEND = """
import torch
from pagedattn import attend, backend_name, build_batch
print(backend_name(torch.device("cpu")))
batch = build_batch([1], [1], [[0]], block_size=4)
for _ in range(2):
    print(attend(torch.ones(1, 2, 16), torch.ones(1, 2, 1, 4, 16), batch, scale=1.0).sum().item())
"""


def run(program, **environment):
    inherited = {k: v for k, v in os.environ.items() if k not in ("CC", "OCTAVO_ATTENTION_BACKEND")}
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=inherited | {"OMP_NUM_THREADS": "1"} | environment,
    )


def test_kernels_are_compiled_into_the_folder_that_is_named_and_found_again(tmp_path):
    first = run(ATTEND, OCTAVO_CACHE=str(tmp_path))
    assert first.stdout.split() == ["cpu", "32.0", "32.0"], first.stderr
    made = list(tmp_path.rglob("*"))
    assert [path.name for path in made if path.is_file()] == ["kernels.so"]
    # Found again where there is no compiler.
    assert run(ATTEND, OCTAVO_CACHE=str(tmp_path), PATH="").stdout.split()[0] == "cpu"


def test_kernels_that_do_not_load_are_compiled_again(tmp_path):
    run(ATTEND, OCTAVO_CACHE=str(tmp_path))
    (library,) = tmp_path.rglob("kernels.so")
    library.write_bytes(b"no library")
    done = run(ATTEND, OCTAVO_CACHE=str(tmp_path))
    assert done.stdout.split() == ["cpu", "32.0", "32.0"]
    assert "compiled again" in done.stderr


def test_a_compiler_with_arguments_and_one_that_is_not_there(tmp_path):
    done = run(ATTEND, OCTAVO_CACHE=str(tmp_path / "a"), CC="cc -DNOTHING")
    assert (done.stdout.split()[0], done.stderr) == ("cpu", "")
    done = run(ATTEND, OCTAVO_CACHE=str(tmp_path / "b"), CC="tcc-that-is-not-here -O")
    assert done.stdout.split()[0] == "cpu"
    assert "CC asks for tcc-that-is-not-here" in done.stderr


def test_without_a_compiler_torch_takes_over_and_it_is_said_once(tmp_path):
    done = run(ATTEND, PATH=str(tmp_path), OCTAVO_CACHE=str(tmp_path))
    assert done.stdout.split() == ["torch", "32.0", "32.0"], done.stderr
    assert done.stderr.count("there is no C compiler") == 1


def test_a_compiler_that_fails_is_named_with_what_it_said(tmp_path):
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'broken: error: no such target' >&2\nexit 1\n")
    compiler.chmod(0o755)
    done = run(ATTEND, CC=str(compiler), OCTAVO_CACHE=str(tmp_path))
    assert done.stdout.split()[0] == "torch"
    assert f"{compiler} failed: broken: error: no such target" in done.stderr


def test_asking_for_the_kernels_by_name_does_not_fall_back(tmp_path):
    program = ATTEND.replace("scale=1.0", 'scale=1.0, backend="cpu"')
    done = run(program, PATH=str(tmp_path), OCTAVO_CACHE=str(tmp_path))
    assert done.returncode == 1
    assert "BackendUnavailable: there is no C compiler" in done.stderr


def test_a_folder_that_cannot_be_written_is_named_once_and_a_temporary_one_serves(tmp_path):
    blocked, temporary = tmp_path / "file", tmp_path / "temporary"
    blocked.touch()
    temporary.mkdir()
    done = run(ATTEND, OCTAVO_CACHE=str(blocked), TMPDIR=str(temporary))
    assert done.stdout.split() == ["cpu", "32.0", "32.0"], done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert str(blocked) in done.stderr
    assert "OCTAVO_CACHE names a folder for them" in done.stderr
    assert list(temporary.iterdir()) == []


def test_where_nothing_can_be_written_torch_takes_over(tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()
    program = f"import tempfile; tempfile.tempdir = {str(blocked)!r}" + ATTEND
    done = run(program, OCTAVO_CACHE=str(blocked))
    assert done.stdout.split()[0] == "torch"
    assert "there is nowhere to compile the kernels" in done.stderr


def test_one_openmp_runtime_serves_torch_and_the_kernels():
    program = ATTEND + "print(sum('omp' in line.split('/')[-1] for line in {"
    program += "line.split()[-1] for line in open('/proc/self/maps')}))"
    assert run(program).stdout.split()[-1] == "1"


def test_tensors_elsewhere_are_refused():
    with pytest.raises(BackendUnavailable, match="asks for cpu, but the tensors are on 'meta'"):
        backend_name(torch.device("meta"), "cpu")
