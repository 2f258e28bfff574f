"""Embeddings from cores in other processes, from several ranks, and over the end of one."""

import asyncio
import os
import random
import signal

import numpy as np
import pytest
import torch

import byte_tokenizer
from checkpoints import Oracle, llama_config, save_random
from enginecore import LLM, AsyncEngine, PoolingParams, Prompt, Request
from enginecore.config import make_config
from enginecore.errors import RequestError
from enginecore.frontend.pooling import embedding_output

OPTIONS = {"dtype": "float32", "device": "cpu", "max_model_len": 128, "max_num_batched_tokens": 24}
KINDS = ("last", "mean")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_random(llama_config(), tmp_path_factory.mktemp("m-rand"))
    byte_tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def prompts():
    draw = random.Random(1)
    return [[draw.randrange(256) for _ in range(draw.randint(1, 128))] for _ in range(24)]


@pytest.fixture(scope="module")
def expected(model, prompts):
    """By pooling, the vector of length 1 of each prompt."""
    oracle, found = Oracle(model), {kind: [] for kind in KINDS}
    with torch.inference_mode():
        for ids in prompts:
            answer = oracle.model(torch.tensor([ids]), output_hidden_states=True)
            states = answer.hidden_states[-1][0].double().numpy()
            for kind, vector in zip(KINDS, (states[-1], states.mean(0)), strict=True):
                found[kind].append(vector / np.linalg.norm(vector))
    return found


def assert_close(outputs, right):
    for output, vector in zip(outputs, right, strict=True):
        assert np.array(output.outputs.embedding) @ vector > 1 - 1e-6


def with_engine(model, scenario):
    async def main():
        engine = AsyncEngine(make_config({"model": str(model), **OPTIONS}))
        try:
            await engine.ready()
            return await asyncio.wait_for(scenario(engine), 120)
        finally:
            await engine.shutdown()

    return asyncio.run(main())


def test_an_asynchronous_engine(model, prompts, expected):
    async def scenario(engine):
        mean = engine.embed(prompts, PoolingParams(pooling_type="mean"))
        last, mean, scores = await asyncio.gather(
            engine.embed(prompts), mean, engine.score(prompts[0], prompts)
        )
        assert_close(last, expected["last"])
        assert_close(mean, expected["mean"])
        first, others = expected["last"][0], expected["last"]
        right = [first @ vector for vector in others]
        assert [output.outputs.score for output in scores] == pytest.approx(right, abs=1e-5)
        assert await engine.embed([]) == []
        with pytest.raises(RequestError, match="129 tokens"):
            await engine.embed([[1], [1] * 129])
        with pytest.raises(RequestError, match="text_1"):
            await engine.score([[1], [2]], [[3], [4], [5]])
        assert engine.num_unfinished == 0

    with_engine(model, scenario)


def test_a_core_that_is_killed_is_started_again_and_changes_no_vector(model, prompts, expected):
    async def scenario(engine):
        (pid,) = engine.core_pids
        found = {}
        async with engine.submit(requests(engine.frontend, prompts)) as stream:
            async for index, output in stream:
                if not found:
                    os.kill(pid, signal.SIGKILL)
                found[index] = embedding_output(output)
        assert engine.core_pids != [pid]
        assert_close([found[index] for index in range(len(found))], expected["last"] + expected["mean"])

    with_engine(model, scenario)


def requests(frontend, prompts):
    """A request for each pooling of each prompt."""
    plans = [frontend.pooling_plan(PoolingParams(pooling_type=kind)) for kind in KINDS]
    wanted = [(prompt, plan) for plan in plans for prompt in prompts]
    return [
        Request.to_pool(str(number), Prompt(None, ids), plan) for number, (ids, plan) in enumerate(wanted)
    ]


@pytest.mark.slow
def test_ranks_of_layers_and_stages(model, prompts, expected):
    llm = LLM(str(model), tensor_parallel_size=2, pipeline_parallel_size=2, **OPTIONS)
    try:
        for kind in KINDS:
            assert_close(llm.embed(prompts, pooling_params=PoolingParams(pooling_type=kind)), expected[kind])
    finally:
        llm.shutdown()


@pytest.mark.slow
def test_ranks_that_share_the_requests_and_one_that_is_killed(model, prompts, expected):
    llm = LLM(str(model), data_parallel_size=2, **OPTIONS)
    try:
        for kind in KINDS:
            assert_close(llm.embed(prompts, pooling_params=PoolingParams(pooling_type=kind)), expected[kind])
        engine, found = llm.llm_engine, {}
        for request in requests(engine.frontend, prompts):
            engine.add(request)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not found:
                    os.kill(engine._engine.core_pids[0], signal.SIGKILL)
                found[int(output.request_id)] = embedding_output(output)
        assert_close([found[index] for index in range(len(found))], expected["last"] + expected["mean"])
        assert len(found) == 2 * len(prompts)
    finally:
        llm.shutdown()
