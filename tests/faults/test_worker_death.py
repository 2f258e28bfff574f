"""Whichever process of an engine is killed, whenever: all of them go, and callers are told which it was.

None is started again here; what happens then is told by test_rank_death.
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from engine_life import OPTIONS, RANKS, reach, workers_of

import byte_tokenizer
from checkpoints import llama_config, save_random
from enginecore import AsyncEngine
from enginecore.config import make_config
from enginecore.errors import OctavoError

SECONDS_TO_GO = 60
"""Seconds after which waiting is given up, on the slowest machine."""


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    path = save_random(llama_config(), tmp_path_factory.mktemp("m-rand"))
    byte_tokenizer.save(path)
    return {"model": str(path), **OPTIONS, "max_rank_restarts": 0}


async def killed(options, phase, victim):
    """Kill a process of an engine, see that all of them go, and return what its caller is told."""
    engine = AsyncEngine(make_config(options))
    try:
        core = psutil.Process(engine.core_pids[0])
        waiting = asyncio.ensure_future(await reach(engine, phase))
        workers = await workers_of(core.pid)
        target = core if victim == "core" else workers[victim]
        target.kill()
        with pytest.raises(OctavoError) as caught:
            await asyncio.wait_for(waiting, SECONDS_TO_GO)
        _, alive = await asyncio.to_thread(psutil.wait_procs, [core, *workers], SECONDS_TO_GO)
        assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
        return str(caught.value), target.pid
    finally:
        await engine.shutdown()


@pytest.mark.parametrize(
    ("phase", "victim"),
    [
        *[("load", 0), ("load", 1), ("prefill", 0), ("prefill", 1)],
        *[("decode", 0), ("decode", 1), ("idle", 1)],
    ],
)
def test_a_killed_worker(options, phase, victim):
    message, pid = asyncio.run(killed(options, phase, victim))
    assert f"rank {victim} of {RANKS} (process {pid}) was killed by signal 9 (Killed)" in message


@pytest.mark.parametrize(("phase", "victim"), [("decode", 1), ("prefill", 0), ("idle", 0)])
def test_a_killed_stage(options, phase, victim):
    stages = {**options, "tensor_parallel_size": 1, "pipeline_parallel_size": RANKS}
    message, pid = asyncio.run(killed(stages, phase, victim))
    assert f"rank {victim} of {RANKS} (process {pid}) was killed by signal 9 (Killed)" in message


@pytest.mark.parametrize("phase", ["decode", "load", "prefill"])
def test_a_killed_core(options, phase):
    message, _ = asyncio.run(killed(options, phase, "core"))
    assert "killed by signal 9" in message


@pytest.mark.parametrize("phase", ["prefill", "load", "decode"])
def test_a_killed_parent(options, phase):
    program = Path(__file__).with_name("engine_life.py")
    command = [sys.executable, program, phase, json.dumps(options)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        processes = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(processes) == 1 + RANKS
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    _, alive = psutil.wait_procs(processes, SECONDS_TO_GO)
    assert alive == []
