"""How a core with several workers starts: without torch, and telling how far it is."""

import asyncio
import logging
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


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_random(llama_config(), tmp_path_factory.mktemp("model"))
    byte_tokenizer.save(path)
    return path


@pytest.mark.skipif(processes.Path("/proc/driver/nvidia").exists(), reason="torch counts the devices")
def test_a_core_of_several_workers_needs_no_torch(model):
    result = subprocess.run(
        [sys.executable, "-c", START, str(model)], capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout == "False\n"
    assert "Gloo" not in result.stderr


def test_the_core_logs_what_its_front_end_logs(model, monkeypatch, capfd):
    """One line a rank and stage of starting, on standard error, and nothing of gloo's."""
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
    said = [line for line in captured.err.splitlines() if "of 2: " in line]
    stages = ("communicators connected", "weights loaded", "KV cache of 8 blocks allocated")
    assert sorted(said) == sorted(
        f"INFO enginecore.executor.distributed: rank {rank} of 2: {stage}"
        for rank in (0, 1)
        for stage in stages
    )
    assert "Gloo" not in captured.err + captured.out


def test_what_workers_write_is_shown_but_for_gloo_s_chatter(capsys):
    lines: processes.collections.deque[str] = processes.collections.deque()
    written = [
        b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n",
        b"[Gloo] connection reset\n",
        b"\xff went wrong\n",
    ]
    processes._repeat(written, lines, 3)
    assert list(lines) == ["[Gloo] connection reset", "\ufffd went wrong"]
    assert capsys.readouterr().err == "[rank 3] [Gloo] connection reset\n[rank 3] \ufffd went wrong\n"
