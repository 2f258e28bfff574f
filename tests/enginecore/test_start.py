"""How an engine starts: without what it does not need, and telling how far it is."""

import asyncio
import logging
import re
import subprocess
import sys

import pytest

import byte_tokenizer
from checkpoints import llama_config, save_random
from enginecore import AsyncEngine
from enginecore.config import make_config
from enginecore.executor import processes

START = """
import sys
from enginecore.config import make_config
from enginecore.core.engine_core import EngineCore
from enginecore.core.process import CoreServer
from enginecore.executor.executor import make_executor
from enginecore.model_files import locate

config = make_config({"model": sys.argv[1], "num_blocks_override": 8, "tensor_parallel_size": 2})
executor = make_executor(config, locate(config.model))
core = EngineCore(config, executor)
print("torch" in sys.modules)
core.shutdown()
"""

HEAVY = ("sympy", "torch._dynamo", "torch._inductor", "transformers", "triton", "fastapi")
"""Imports that would decide the seconds before the first answer."""

START_HERE = f"""
import sys
from enginecore import LLM
LLM(sys.argv[1], device="cpu")
print([name for name in {HEAVY} if name in sys.modules])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_random(llama_config(), tmp_path_factory.mktemp("model"))
    byte_tokenizer.save(path)
    return path


@pytest.mark.slow
@pytest.mark.skipif(processes.Path("/proc/driver/nvidia").exists(), reason="torch counts the devices")
def test_a_core_of_several_workers_needs_no_torch(model):
    result = subprocess.run(
        [sys.executable, "-c", START, str(model)], capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout == "False\n"
    assert "Gloo" not in result.stderr


@pytest.mark.slow
def test_the_core_logs_what_its_front_end_logs(model, monkeypatch, capfd):
    """One line a rank and part of starting, on standard error, and nothing of gloo's."""
    monkeypatch.setattr(logging.getLogger("enginecore"), "level", logging.INFO)
    options = {"device": "cpu", "num_blocks_override": 8, "tensor_parallel_size": 2}

    async def start():
        async with asyncio.timeout(120):
            engine = AsyncEngine(make_config({"model": str(model), **options}))
            try:
                await engine.ready()
            finally:
                await engine.shutdown()

    asyncio.run(start())
    captured = capfd.readouterr()
    said = [line.partition("Z ")[2] for line in captured.err.splitlines() if "of 2: " in line]
    stages = (
        "connecting the ranks",
        "preparing kernels",
        "reading weights",
        "waiting for the other ranks",
        "allocating a KV cache of 8 blocks",
        "recording the layers",
    )
    assert sorted(said) == sorted(
        f"INFO enginecore.executor.distributed: rank {rank} of 2: {stage}"
        for rank in (0, 1)
        for stage in stages
    )
    for rank in (0, 1):
        worker = rf"^\S+Z INFO \[rank {rank}\] enginecore\.worker\.worker: "
        assert re.search(worker + ".* on cpu in float32, .* kernels, threads: ", captured.err, re.MULTILINE)
        assert re.search(worker + "KV cache: 128 tokens in 8 blocks of 16 ", captured.err, re.MULTILINE)
    assert "Gloo" not in captured.err + captured.out


def test_what_workers_log_is_passed_on_and_what_they_print_is_logged_but_for_gloo_s_chatter(capsys, caplog):
    lines: processes.collections.deque[str] = processes.collections.deque()
    written = [
        b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n",
        b"[Gloo] connection reset\n",
        b"\xff went wrong\n",
        b"2026-01-01T00:00:00.000Z ERROR [rank 3] enginecore.worker: it failed\n",
        b"    Traceback\n",
        b"printed\n",
        b"    indented\n",
    ]
    processes._repeat(written, lines, 3)
    assert list(lines) == ["[Gloo] connection reset", "\ufffd went wrong", "printed", "    indented"]
    assert [record.getMessage() for record in caplog.records] == [
        "rank 3 wrote: [Gloo] connection reset",
        "rank 3 wrote: \ufffd went wrong",
        "rank 3 wrote: printed",
        "rank 3 wrote:     indented",
    ]
    logged = "2026-01-01T00:00:00.000Z ERROR [rank 3] enginecore.worker: it failed\n    Traceback\n"
    assert capsys.readouterr().err == logged


def test_a_model_is_ready_without_what_it_does_not_need(tmp_path):
    path = save_random(llama_config(), tmp_path)  # without a tokenizer, which transformers reads
    done = subprocess.run([sys.executable, "-c", START_HERE, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
