"""`AsyncEngine`: a core in a process of its own, and what happens when either side ends."""

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest

import byte_tokenizer
from checkpoints import Oracle, llama_config, save_random
from enginecore import AsyncEngine, Request, SamplingParams
from enginecore.config import make_config
from enginecore.core.client import CoreClient
from enginecore.errors import EngineDeadError, ModelError, RequestAbortedError, RequestError
from enginecore.messages import AddRequest

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_random(llama_config(), tmp_path_factory.mktemp("m-rand"))
    byte_tokenizer.save(path)
    return path


def with_engine(model, scenario, **options):
    config = make_config({"model": str(model), "dtype": "float32", "device": "cpu", **options})

    async def main():
        engine = AsyncEngine(config)
        try:
            await engine.ready()
            return await asyncio.wait_for(scenario(engine), 120)
        finally:
            await engine.shutdown()

    return asyncio.run(main())


async def idle(engine):
    """Wait until the core reports that it runs nothing."""
    async with asyncio.timeout(30):
        while (engine.stats.running, engine.stats.waiting, engine.stats.kv_cache_usage) != (0, 0, 0):
            await asyncio.sleep(0.01)
    return engine.num_unfinished == 0


def submit(engine, request_id, prompt, params):
    return engine.submit([Request(request_id, engine.frontend.prepare_prompt(prompt), params)])


async def last(stream):
    return [output async for output in stream][-1]


def test_many_at_once(model):
    prompts = [bytes([97 + i % 26] * (1 + i % 9)).decode() for i in range(30)]
    oracle = Oracle(model)

    async def scenario(engine):
        outputs = await asyncio.gather(
            *(last(engine.generate(prompt, SHORT, f"r{i}")) for i, prompt in enumerate(prompts))
        )
        assert await idle(engine)
        return outputs, engine.metrics.text().decode()

    outputs, metrics = with_engine(model, scenario)
    for prompt, output in list(zip(prompts, outputs, strict=True))[:5]:
        assert output.outputs[0].token_ids == oracle.greedy(list(prompt.encode()), 10)[0]
    assert f'octavo_generation_tokens_total{{engine="0",model_name="{model}"}} 300.0' in metrics
    assert (
        f'octavo_request_success_total{{engine="0",finished_reason="length",model_name="{model}"}} 30.0'
        in metrics
    )
    assert f'octavo_num_requests_running{{engine="0",model_name="{model}"}} 0.0' in metrics


def test_leaving_early_aborts(model):
    async def scenario(engine):
        async for _ in engine.generate("abc", LONG, "left"):
            break
        task = asyncio.create_task(last(engine.generate("abc", LONG, "cancelled")))
        await anext(aiter(engine.generate("xyz", SHORT, "other")))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stream = submit(engine, "aborted", "abc", LONG)
        await anext(stream)
        await engine.abort("aborted")
        with pytest.raises(RequestAbortedError, match="aborted"):
            await last(stream)
        return await idle(engine) and len(
            (await last(engine.generate("a", SHORT, "next"))).outputs[0].token_ids
        )

    assert with_engine(model, scenario, max_num_seqs=2) == 10


@pytest.mark.slow
def test_one_id_again_and_again(model):
    async def scenario(engine):
        for _ in range(50):
            stream = submit(engine, "same", "abc", LONG)
            with pytest.raises(RequestError, match="unfinished request"):
                submit(engine, "same", "abc", LONG)
            await stream.aclose()
        return await idle(engine)

    assert with_engine(model, scenario)


@pytest.mark.slow
def test_bad_requests_are_refused_at_once(model):
    async def scenario(engine):
        for prompt in ("", [], [-1], [320], [1.5], {"text": "a"}, "x" * 600):
            with pytest.raises(RequestError):
                submit(engine, "bad", prompt, SHORT)
        return (await last(engine.generate([319], SHORT, "bad"))).finished

    assert with_engine(model, scenario)


@pytest.mark.slow
def test_a_request_that_cannot_be_sent_leaves_nothing(model, monkeypatch):
    send = CoreClient.send

    def refuse(client, message):
        if isinstance(message, AddRequest):
            raise TypeError("it holds something that does not cross")
        send(client, message)

    async def scenario(engine):
        with monkeypatch.context() as patch:
            patch.setattr(CoreClient, "send", refuse)
            for _ in range(2):
                with pytest.raises(TypeError):
                    submit(engine, "same", "abc", SHORT)
        left = engine.num_unfinished, len(engine.streams), engine.frontend.unfinished
        await last(submit(engine, "same", "abc", SHORT))
        return left

    assert with_engine(model, scenario) == (0, 0, 0)


def test_who_waits_for_an_engine_that_is_shut_down_is_told(model):
    async def scenario():
        engine = AsyncEngine(make_config({"model": str(model), "device": "cpu"}))
        waiting = asyncio.create_task(engine.ready())
        await asyncio.sleep(0)
        await engine.shutdown()
        for ready in (waiting, engine.ready()):
            with pytest.raises(EngineDeadError, match="the engine was shut down"):
                await ready

    asyncio.run(scenario())


def test_a_killed_core_that_is_not_started_again_fails_its_streams(model):
    async def scenario(engine):
        streams = [submit(engine, str(i), "abc", LONG) for i in range(3)]
        await anext(streams[0])
        [core] = engine.core_pids
        os.kill(core, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDeadError, match="killed by signal 9"):
                await asyncio.wait_for(last(stream), 5)
        with pytest.raises(EngineDeadError):
            submit(engine, "next", "abc", SHORT)
        return engine.is_ready, psutil.pid_exists(core)

    assert with_engine(model, scenario, max_rank_restarts=0) == (False, False)


@pytest.mark.slow
def test_a_core_ends_with_its_parent(model):
    script = f"""
import asyncio, sys, time
from enginecore import AsyncEngine
from enginecore.config import make_config
async def main():
    engine = AsyncEngine(make_config({{"model": {str(model)!r}, "device": "cpu"}}))
    await engine.ready()
    print(engine.core_pids[0], flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    core = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    core.wait(timeout=5)


@pytest.mark.slow
def test_a_model_that_cannot_load(tmp_path, model):
    async def scenario():
        engine = AsyncEngine(make_config({"model": str(tmp_path / "none")}))
        with pytest.raises(ModelError, match="there is no folder"):
            await engine.ready()
        await engine.shutdown()
        engine = AsyncEngine(
            make_config({"model": str(model), "num_blocks_override": 2, "max_model_len": 100})
        )
        with pytest.raises(ModelError, match="the longest that fits is 33"):
            await engine.ready()
        await engine.shutdown()

    asyncio.run(scenario())


def test_the_front_end_loads_no_torch():
    heavy = "{'torch', 'transformers', 'triton'}"
    script = f"import sys, enginecore.async_engine; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n"
