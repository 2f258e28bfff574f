"""Engines in a process that was forked after they were made."""

import asyncio
import multiprocessing
import os
import subprocess
import sys

import pytest

import byte_tokenizer
from checkpoints import llama_config, save_random
from enginecore import AsyncEngine, SamplingParams
from enginecore.config import make_config
from enginecore.errors import ForkError

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_random(llama_config(), tmp_path_factory.mktemp("model"))
    byte_tokenizer.save(path)
    return str(path)


def in_fork(call):
    """Return the name of what `call` raises in a fork of this process, or "nothing"."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run():
        try:
            call()
        except Exception as error:
            sender.send((type(error).__name__, str(error)))
        else:
            sender.send(("nothing", ""))

    child = context.Process(target=run)
    child.start()
    try:
        assert receiver.poll(60), "the fork hangs"
        return receiver.recv()
    finally:
        child.kill()
        child.join()


PARENT = """
import os, sys
from enginecore import LLM, SamplingParams
from enginecore.errors import ForkError

options = {"device": "cpu", "dtype": "float32", "num_blocks_override": 64}
llm = LLM(sys.argv[1], tensor_parallel_size=sys.argv[2], **options)
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
answer = lambda: llm.generate(["abc", "de"], params)[1].outputs[0].token_ids
before = answer()
child = os.fork()
if child == 0:
    refused = 0
    chat = lambda: llm.chat([{"role": "user", "content": "a"}])
    for call in (answer, chat, llm.llm_engine.step, llm.expert_loads):
        try:
            call()
        except ForkError:
            refused += 1
    llm.shutdown()
    print("refused", refused, flush=True)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print("same", answer() == before)
llm.shutdown()
"""
"""The child ends as programs do, with everything that runs at exit."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_child_is_refused_and_the_parent_goes_on(model, ranks):
    done = subprocess.run(
        [sys.executable, "-c", PARENT, model, str(ranks)],
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines() == ["refused 4", "same True"], done.stderr


def test_an_async_engine_is_refused_too_and_its_core_lives_on(model):
    async def last_of(engine, name):
        async for output in engine.generate("abc", GREEDY, name):
            last = output
        return last.outputs[0].token_ids

    async def run():
        async with asyncio.timeout(120):
            engine = AsyncEngine(make_config({"model": model, "device": "cpu", "num_blocks_override": 64}))
            try:
                await engine.ready()
                before = await last_of(engine, "1")
                for call in (
                    lambda: engine.submit([]),
                    lambda: asyncio.run(engine.ready()),
                    lambda: asyncio.run(engine.abort("1")),
                    lambda: asyncio.run(engine.reset_prefix_cache()),
                ):
                    kind, message = in_fork(call)
                    assert kind == ForkError.__name__
                    assert f"made in process {os.getpid()}" in message
                assert in_fork(lambda: asyncio.run(engine.shutdown()))[0] == "nothing"
                assert await last_of(engine, "2") == before
            finally:
                await engine.shutdown()

    asyncio.run(run())
