"""Bring an engine of several processes into a phase of its life. Needs no torch.

As a program, `engine_life.py PHASE OPTIONS` (JSON) does so, prints the process ids of its core and its
workers, and goes on until it is killed.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable
from typing import Any

import psutil

from enginecore import AsyncEngine, Request, RequestStream, SamplingParams
from enginecore.config import make_config
from enginecore.errors import OctavoError

RANKS = 2
LIMIT_S = 60
PROMPT = "x" * 300
"""With OPTIONS a prompt of many steps, so that there is time to be killed in."""
OPTIONS = {"dtype": "float32", "device": "cpu", "tensor_parallel_size": RANKS, "max_num_batched_tokens": 16}
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


async def reach(engine: AsyncEngine, phase: str) -> Awaitable[Any]:
    """Bring `engine` to load, prefill, decode or be idle; return what a caller then waits for."""
    if phase == "load":
        return engine.ready()
    await engine.ready()
    if phase == "idle":
        return _ended(engine)
    prompt = engine.frontend.prepare_prompt(PROMPT)
    stream = engine.submit([Request("r", prompt, LONG)])
    async with asyncio.timeout(LIMIT_S):
        if phase == "decode":
            await anext(stream)
        while engine.stats.running == 0:
            await asyncio.sleep(0)
    [state] = stream.states
    assert (state.last_token_time is None) == (phase == "prefill")
    return _drain(stream)


async def workers_of(core_pid: int) -> list[psutil.Process]:
    """Wait until the core has started a process for every rank; return them in the order of their ranks."""
    core = psutil.Process(core_pid)
    async with asyncio.timeout(LIMIT_S):
        while True:
            found = [child for child in core.children() if _is_worker(child)]
            if len(found) == RANKS:
                return sorted(found, key=lambda process: process.pid)
            await asyncio.sleep(0.01)


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "enginecore.worker.process" in process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


async def _drain(stream: RequestStream) -> None:
    async for _ in stream:
        pass


async def _ended(engine: AsyncEngine) -> None:
    while engine.error is None:
        await asyncio.sleep(0.01)
    raise OctavoError(engine.error)


async def main(phase: str, options: dict[str, Any]) -> None:
    engine = AsyncEngine(make_config(options))
    waiting = asyncio.ensure_future(await reach(engine, phase))
    workers = await workers_of(engine.core_pids[0])
    print(engine.core_pids[0], *(worker.pid for worker in workers), flush=True)
    await waiting


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
