"""Engines in odd surroundings: working folders, users and host programs that they were not made for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import successor_model

pytestmark = pytest.mark.slow

PROMPT = "a"
ANSWER = "bcSTOPzz"
"""What M-succ answers to it."""

LIBRARIES = ("random", "types", "numpy", "torch", "msgspec", "zmq", "enginecore", "json", "transformers")

TWO_RANKS = """
import asyncio, sys
from enginecore import AsyncEngine, SamplingParams
from enginecore.config import make_config
config = make_config({"model": sys.argv[1], "device": "cpu", "num_blocks_override": 8, **RANKS})
async def answer():
    engine = AsyncEngine(config)
    try:
        await engine.ready()
        async for output in engine.generate("a", SamplingParams(temperature=0, max_tokens=8), "r"):
            last = output
        print(last.outputs[0].text)
    finally:
        await engine.shutdown()
asyncio.run(answer())
""".replace("RANKS", '{"pipeline_parallel_size": 1, "distributed_executor_backend": "mp"}')
"""A core process and a worker process."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(successor_model.write(tmp_path_factory.mktemp("surroundings") / "model"))


@pytest.fixture
def hostile(tmp_path):
    """A folder of files named like libraries, none of which can be imported."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in LIBRARIES:
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name} of the working folder')\n")
    return folder


def offline(model):
    """Return a command that answers PROMPT."""
    options = ["--prompt", PROMPT, "--temperature", "0", "--max-tokens", "8"]
    return [str(Path(sys.executable).parent / "octavo-offline"), model, "--device", "cpu", *options]


def test_a_working_folder_of_files_named_like_libraries(model, hostile):
    done = subprocess.run(offline(model), cwd=hostile, capture_output=True, text=True, timeout=120)
    assert ANSWER in done.stdout, done.stderr


def test_the_same_for_core_and_worker_processes(model, hostile, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(TWO_RANKS)
    done = subprocess.run(
        [sys.executable, str(program), model], cwd=hostile, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == ANSWER, done.stderr


def unshared(command, *options, **more):
    """Run a command in name spaces of its own, or skip where that is forbidden."""
    program = shutil.which("unshare")
    if program is None or subprocess.run([program, *options, "true"]).returncode:
        pytest.skip("needs name spaces")
    return subprocess.run([program, *options, *command], capture_output=True, text=True, timeout=200, **more)


def test_a_user_without_name_home_compiler_and_temporary_folder(model, tmp_path):
    hidden = ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME", "OCTAVO_CACHE", "CC")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    environment = kept | {"PATH": str(tmp_path), "TMPDIR": "/nowhere", "OMP_NUM_THREADS": "1"}
    done = unshared(offline(model), "--user", "--map-user=12345", cwd="/", env=environment)
    assert done.returncode == 0, done.stderr
    assert ANSWER in done.stdout
    assert done.stderr.count("there is no C compiler") == 1


SMALL = """
mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"
"""


def test_several_processes_need_no_room_in_dev_shm(model, tmp_path):
    """Docker gives it 64 MB."""
    program = tmp_path / "program.py"
    program.write_text(TWO_RANKS.replace('"pipeline_parallel_size": 1', '"tensor_parallel_size": 5'))
    if os.geteuid() != 0:
        pytest.skip("needs to mount over /dev/shm")
    done = unshared(["sh", "-c", SMALL, "sh", sys.executable, str(program), model], "--mount")
    assert done.stdout.strip() == ANSWER, done.stderr


HOST = """
import sys
import torch
from enginecore import LLM, SamplingParams

def answers():
    params = [
        SamplingParams(temperature=0, max_tokens=8),
        SamplingParams(temperature=1.2, seed=1, top_p=0.9, top_k=40, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=5, seed=2, max_tokens=8, ignore_eos=True, logit_bias={65: 2.0}),
        SamplingParams(temperature=2, seed=3, min_p=0.01, max_tokens=8, repetition_penalty=1.2, logprobs=1),
    ]
    llm = LLM(sys.argv[1], device="cpu", dtype="float32", num_blocks_override=64)
    return [output.outputs[0].token_ids for output in llm.generate(["a", "q", "abc", "e"], params)]

expected = answers()
torch.set_default_dtype(torch.float64)
assert answers() == expected
torch.set_default_dtype(torch.float32)
torch.use_deterministic_algorithms(True)
assert answers() == expected
"""


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_host_programs_whose_torch_is_float64_or_deterministic(model, backend):
    environment = os.environ | {"OCTAVO_ATTENTION_BACKEND": backend}
    done = subprocess.run(
        [sys.executable, "-c", HOST, model], env=environment, capture_output=True, text=True, timeout=200
    )
    if "BackendUnavailable: there is no C compiler" in done.stderr:
        pytest.skip("the kernels need a C compiler")
    assert done.returncode == 0, done.stderr
