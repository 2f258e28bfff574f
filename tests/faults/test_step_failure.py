"""A step that fails ends the engine once: who waits is told the cause, and so is who comes later."""

import asyncio
import sys
import threading
import traceback
from pathlib import Path

import httpx
import pytest
from faulty import FAULTS, SAID, faulty

import byte_tokenizer
from checkpoints import Oracle, llama_config, save_random
from enginecore import LLM, AsyncEngine, LLMEngine, Request, SamplingParams
from enginecore.config import make_config
from enginecore.core import rank_process
from enginecore.errors import EngineDeadError
from enginecore.executor import processes
from octavo_serve.app import create_app
from octavo_serve.config import ServeConfig

OPTIONS = {"dtype": "float32", "device": "cpu", "max_model_len": 128}
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
FAULTY = str(Path(__file__).parent / "faulty.py")
PATIENCE_S = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_random(llama_config(), tmp_path_factory.mktemp("m-rand"))
    byte_tokenizer.save(path)
    return path


def traced(engine):
    """The frames that are kept of a late caller's error."""
    with pytest.raises(EngineDeadError) as late:
        engine.add_request("c", "abc", SHORT)
    return [frame.name for frame in traceback.extract_tb(late.value.__traceback__)]


@pytest.mark.parametrize("fault", FAULTS)
def test_in_one_process(model, fault):
    engine = LLMEngine(make_config({"model": str(model), **OPTIONS}))
    for name in "ab":
        engine.add_request(name, "abc", LONG)
    with faulty(fault), pytest.raises(EngineDeadError) as first:
        while engine.has_unfinished_requests():
            engine.step()
    assert str(first.value) == f"the engine has ended: {SAID[fault]}"
    assert first.value.__cause__ is FAULTS[fault][3]
    for attempt in (engine.step, lambda: engine.add_request("c", "abc", SHORT), engine.expert_loads):
        with pytest.raises(EngineDeadError) as later:
            attempt()
        assert str(later.value) == str(first.value)
    callers = [traced(engine), traced(engine)]
    assert callers[0] == callers[1]
    engine.abort_request("a")
    found = {(value.name, value.labels.get("finished_reason")): value for value in engine.get_metrics()}
    ended = [found["octavo_request_success_total", reason].value for reason in ("error", "abort")]
    assert (found["octavo_engine_up", None].value, ended) == (0, [2, 0])
    engine.shutdown()


def test_an_llm_can_be_made_anew(model):
    llm = LLM(str(model), **OPTIONS)
    with faulty("memory"), pytest.raises(EngineDeadError, match="no 7 GiB left"):
        llm.generate(["abc", "xyz"], LONG)
    with pytest.raises(EngineDeadError, match="no 7 GiB left"):
        llm.generate("abc", SHORT)
    again = LLM(str(model), **OPTIONS).generate("abc", SHORT)
    assert again[0].outputs[0].token_ids == Oracle(model).greedy(list(b"abc"), 8)[0]


def test_threads_that_share_an_llm_are_all_told(model):
    llm = LLM(str(model), **OPTIONS)
    told: list[str] = []

    def ask():
        try:
            llm.generate("abc", LONG)
        except EngineDeadError as error:
            told.append(str(error))

    with faulty("model"):
        threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert told == [f"the engine has ended: {SAID['model']}"] * 4


async def told_by(engine: AsyncEngine) -> list[str]:
    """What the readers of four streams, and then a late caller, are told by an engine whose step fails."""
    streams = [
        engine.submit([Request(str(i), engine.frontend.prepare_prompt("abc"), LONG)]) for i in range(4)
    ]
    told = []
    async with asyncio.timeout(PATIENCE_S):
        for stream in streams:
            with pytest.raises(EngineDeadError) as caught:
                async for _ in stream:
                    pass
            told.append(str(caught.value))
    with pytest.raises(EngineDeadError) as late:
        engine.submit([Request("late", streams[0].states[0].request.prompt, SHORT)])
    return [*told, str(late.value)]


@pytest.mark.parametrize("fault", FAULTS)
def test_in_a_core_process(model, fault, monkeypatch, capfd):
    command = (sys.executable, FAULTY, fault, "enginecore.core.process")
    monkeypatch.setattr(rank_process, "COMMAND", command)

    async def scenario():
        engine = AsyncEngine(make_config({"model": str(model), **OPTIONS, "max_rank_restarts": 0}))
        app = create_app(engine, ServeConfig())
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            try:
                await engine.ready()
                assert (await http.get("/health")).status_code == 200
                told = await told_by(engine)
                health = await http.get("/health")
                answer = await http.post("/v1/completions", json={"prompt": "abc"})
                return told, health, answer
            finally:
                await engine.shutdown()

    told, health, answer = asyncio.run(scenario())
    said = f"the engine has ended: {SAID[fault]}"
    assert told == [said] * 5
    assert (health.status_code, answer.status_code) == (503, 503)
    assert health.json()["error"]["message"] == answer.json()["error"]["message"] == said
    log = capfd.readouterr().err
    assert "Traceback" in log
    assert type(FAULTS[fault][3]).__name__ in log


@pytest.mark.parametrize("fault", ["model", "memory"])
def test_on_one_rank_of_two(model, fault, monkeypatch, caplog):
    monkeypatch.setattr(processes, "_COMMAND", (sys.executable, FAULTY, fault, "enginecore.worker.process"))
    engine = LLMEngine(make_config({"model": str(model), **OPTIONS, "tensor_parallel_size": 2}))
    try:
        engine.add_request("a", "abc", LONG)
        with pytest.raises(EngineDeadError) as caught:
            while engine.has_unfinished_requests():
                engine.step()
    finally:
        engine.shutdown()
    assert str(caught.value).startswith("the engine has ended: rank 1 of 2 (process ")
    assert str(caught.value).endswith(f"failed: {SAID[fault]}")
    assert "Traceback" in caplog.text
