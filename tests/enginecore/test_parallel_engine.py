"""`LLM` and `octavo-offline` over several ranks: the answers of one engine, whatever becomes of a rank."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

import byte_tokenizer
from checkpoints import llama_config, save_random
from enginecore import LLM, LLMEngine, SamplingParams
from enginecore.config import make_config
from enginecore.errors import ConfigError, EngineDeadError, ModelError, RequestError
from enginecore.metrics import Counter

OPTIONS = {"dtype": "float32", "device": "cpu", "max_model_len": 128}
PROMPTS = [{"prompt_token_ids": [(7 * i + j) % 250 + 3 for j in range(5 + i % 9)]} for i in range(24)]
PARAMS = [
    SamplingParams(temperature=i % 2, seed=i, max_tokens=12 + i % 5, ignore_eos=True, n=1 + i % 2, logprobs=1)
    for i in range(24)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_random(llama_config(), tmp_path_factory.mktemp("m-rand"))
    byte_tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def expected(model):
    return answers(LLM(str(model), **OPTIONS).generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.fixture(scope="module")
def llm(model):
    llm = LLM(str(model), data_parallel_size=2, **OPTIONS)
    yield llm
    llm.shutdown()


def answers(outputs):
    return [
        (sample.text, list(sample.token_ids), sample.finish_reason, len(sample.logprobs))
        for output in outputs
        for sample in output.outputs
    ]


def test_one_engine_in_this_process_is_one_rank(model):
    with pytest.raises(ConfigError, match="data_parallel_size=2: LLMEngine is one engine"):
        LLMEngine(make_config({"model": str(model), "data_parallel_size": 2, **OPTIONS}))


@pytest.mark.slow
def test_two_ranks_share_a_batch_and_answer_as_one(llm, expected):
    assert answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    generated = {
        metric.labels["engine"]: metric.value
        for metric in llm.get_metrics()
        if isinstance(metric, Counter) and metric.name == "octavo_generation_tokens_total"
    }
    total = sum(len(token_ids) for _, token_ids, _, _ in expected)
    assert sum(generated.values()) == total
    assert min(generated.values()) > total / 3


@pytest.mark.slow
def test_a_rank_that_is_killed_changes_no_answer(llm, expected):
    cores = [
        process for process in psutil.Process().children() if "enginecore.core.process" in process.cmdline()
    ]
    killed = threading.Event()

    def kill() -> None:
        while not llm.llm_engine.stats().running:
            pass
        os.kill(cores[0].pid, signal.SIGKILL)
        killed.set()

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    assert answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    assert killed.is_set()


@pytest.mark.slow
def test_what_is_refused_hurts_nobody(llm, expected):
    with pytest.raises(RequestError, match="prompt 1"):
        llm.generate([PROMPTS[0], {"prompt_token_ids": [999]}], PARAMS[0], use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.expert_loads() is None
    assert llm.reset_prefix_cache()
    assert answers(llm.generate(PROMPTS[:4], PARAMS[:4], use_tqdm=False)) == expected[:6]


@pytest.mark.slow
def test_after_shutdown_and_without_a_model(model, tmp_path):
    llm = LLM(str(model), data_parallel_size=2, **OPTIONS)
    pids = llm.llm_engine._engine.core_pids
    llm.shutdown()
    assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate("abc", SamplingParams(max_tokens=1))
    with pytest.raises(ModelError):
        LLM(str(tmp_path), data_parallel_size=2, **OPTIONS)


@pytest.mark.slow
def test_octavo_offline_spreads_a_batch(model, tmp_path):
    lines = [
        {
            "custom_id": str(index),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": prompt["prompt_token_ids"], "max_tokens": 6, "temperature": 0},
        }
        for index, prompt in enumerate(PROMPTS)
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = []
    for ranks in ("1", "2"):
        target = tmp_path / f"out{ranks}.jsonl"
        program = str(Path(sys.executable).parent / "octavo-offline")
        command = [program, str(model), "--input", str(source)]
        flags = ["--output", str(target), "--data-parallel-size", ranks, "--dtype", "float32"]
        subprocess.run([*command, *flags, "--max-model-len", "128"], check=True, capture_output=True)
        texts = {}
        for line in target.read_text().splitlines():
            answer = json.loads(line)
            texts[answer["custom_id"]] = answer["response"]["body"]["choices"][0]["text"]
        found.append(texts)
    assert found[0] == found[1]
    assert len(found[0]) == len(PROMPTS)
