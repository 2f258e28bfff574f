"""Worker processes: tensor parallelism gives the tokens of one process, and what a worker refuses is told."""

import subprocess
from dataclasses import replace

import psutil
import pytest
import torch
from transformers import Qwen2Config

import byte_tokenizer
from checkpoints import (
    gemma_config,
    gpt2_config,
    llama_config,
    mixtral_config,
    random_sizes,
    save_random,
)
from collectives import LocalCommunicator
from cores import run, start_core
from enginecore import LLM, SamplingParams
from enginecore.config import make_config
from enginecore.core.engine_core import EngineCore
from enginecore.errors import ConfigError, EngineDeadError, ModelError
from enginecore.executor import link, processes
from enginecore.executor.executor import make_executor
from enginecore.model_files import locate
from enginecore.private_folder import private_folder
from enginecore.worker.runner.kv_sizing import CacheSizing, cache_size
from executors import Smaller, assert_same, options, ragged_asks
from pagedattn import KVLayout

CONFIGS = {
    "llama": llama_config(),
    "qwen2 (biases)": Qwen2Config(**random_sizes(initializer_range=0.4)),
    "gemma2": gemma_config(2),
    "gpt2": gpt2_config(),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name != "llama")) for name in CONFIGS],
)
def model(request, tmp_path_factory):
    path = save_random(CONFIGS[request.param], tmp_path_factory.mktemp("model"))
    byte_tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def truth(model):
    return run(start_core(model, enable_prefix_caching=False), ragged_asks())


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def executor(request, model):
    config = options(model, tensor_parallel_size=request.param)
    executor = make_executor(config, locate(config.model))
    processes = [psutil.Process(pid) for pid in executor.pids]
    assert len(processes) == request.param
    yield executor
    executor.shutdown()
    assert not any(process.is_running() for process in processes)


def test_tokens_of_one_process(model, truth, executor):
    config = options(model)
    core = EngineCore(config, executor)
    assert_same(run(core, ragged_asks()), truth)
    again = run(core, ragged_asks())
    assert_same(again, truth)
    assert sum(answer.cached for answer in again) >= 16 * 5  # all but those that asked for prompt logprobs


def test_tokens_of_one_process_in_chunks_and_preempted(model, truth, executor):
    """With two steps under way at once."""
    config = replace(options(model), max_num_batched_tokens=16, max_num_seqs=8)
    core = EngineCore(config, Smaller(executor, num_blocks=5, max_model_len=80, depth=2))
    assert_same(run(core, ragged_asks()), truth)
    assert core.stats().preemptions > 0


@pytest.mark.slow
def test_a_user_has_two_ranks(tmp_path):
    path = save_random(llama_config(), tmp_path / "model")
    byte_tokenizer.save(path)
    plain = {"dtype": "float32", "device": "cpu"}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = ["abc", "x", "hello there"]
    expected = [output.outputs[0].text for output in LLM(str(path), **plain).generate(prompts, params)]
    others = psutil.Process().children()
    llm = LLM(str(path), tensor_parallel_size=2, **plain)
    workers = [child for child in psutil.Process().children() if child not in others]
    assert len(workers) == 2
    assert [output.outputs[0].text for output in llm.generate(prompts, params)] == expected
    llm.shutdown()
    assert not any(worker.is_running() for worker in workers)
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate(prompts, params)


@pytest.mark.slow
def test_whole_experts_on_each_rank(tmp_path):
    path = save_random(mixtral_config(), tmp_path / "model")
    config = options(path, tensor_parallel_size=2, enable_expert_parallel=True)
    told: list[tuple[int, int]] = []
    executor = make_executor(config, locate(config.model), on_loaded=lambda *counts: told.append(counts))
    assert_same(run(EngineCore(config, executor), ragged_asks()), run(start_core(path), ragged_asks()))
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] > 0
    executor.shutdown()


@pytest.mark.slow
def test_what_a_rank_refuses(tmp_path):
    path = save_random(llama_config(), tmp_path / "model")
    byte_tokenizer.save(path)
    with pytest.raises(ConfigError, match=r"rank [01]: .*the longest that fits is 33"):
        LLM(str(path), tensor_parallel_size=2, device="cpu", num_blocks_override=2, max_model_len=100)
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"rank 0: .*no .safetensors weights"):
        LLM(str(path), distributed_executor_backend="mp", device="cpu")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1, got 0"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be at least 1, got 0"),
        ({"pipeline_parallel_size": 2, "async_scheduling": False}, "which async_scheduling=false forbids"),
        (
            {"distributed_executor_backend": "inproc", "pipeline_parallel_size": 3},
            "inproc runs 1 rank, and 3",
        ),
        ({"distributed_executor_backend": "inproc", "tensor_parallel_size": 2}, "inproc runs 1 rank, and 2"),
        ({"device": "cuda:1", "tensor_parallel_size": 2}, "device=cuda:1 is one device, and 2 ranks"),
        ({"distributed_timeout_seconds": 0}, "distributed_timeout_seconds must be more than 0"),
        ({"distributed_timeout_seconds": "inf"}, "distributed_timeout_seconds must be more than 0"),
    ],
)
def test_options_that_contradict(given, message):
    with pytest.raises(ConfigError, match=message):
        make_config(given)


class Poorer(LocalCommunicator):
    """The world of a rank among others of which one has room for 40 blocks, and another for 3 of the host."""

    def all_reduce(self, x, op="sum"):
        assert op == "min"
        return x.minimum(torch.tensor([40, 3]))


def test_the_rank_with_least_room_decides():
    layout = KVLayout(2, 2, 16, 16, torch.float32)
    config = make_config({"device": "cpu"})
    available = 100 * layout.bytes_per_block
    own = cache_size(config, layout, 1000, available)
    agreed = CacheSizing(config, layout, 1000, Poorer(), torch.device("cpu")).agree(available)
    assert (own.num_blocks, own.max_model_len) == (100, 1000)
    assert (agreed.num_blocks, agreed.max_model_len, agreed.host_blocks) == (40, 40 * 16 + 1, 0)


def test_a_process_that_cannot_be_started_leaves_nothing(monkeypatch):
    folders, started, popen = [], [], subprocess.Popen

    def noted():
        folders.append(private_folder())
        return folders[-1]

    def second_fails(*arguments, **options):
        if started:
            raise OSError("no more processes")
        started.append(popen(*arguments, **options))
        return started[0]

    monkeypatch.setattr(link, "private_folder", noted)
    monkeypatch.setattr(processes.subprocess, "Popen", second_fails)
    with pytest.raises(OSError, match="no more processes"):
        processes.start_processes(make_config({"device": "cpu", "tensor_parallel_size": 2}))
    assert started[0].returncode is not None
    assert len(folders) == 2
    assert [folder for folder in folders if folder.exists()] == []


def test_more_ranks_than_devices(tmp_path):
    path = save_random(llama_config(), tmp_path / "model")
    config = options(path, device="cuda", tensor_parallel_size=4)
    with pytest.raises(ConfigError, match=r"4 ranks need a CUDA device each, and this machine has \d+"):
        make_executor(config, locate(config.model))
    with pytest.raises(ConfigError, match="enable_expert_parallel: the model has no experts"):
        make_executor(options(path, enable_expert_parallel=True), locate(str(path)))
