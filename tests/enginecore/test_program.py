"""The recorded layers against the modules that they were recorded from, on the same schedules."""

import logging

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)

import model_steps
from checkpoints import (
    gemma_config,
    gpt2_config,
    llama_config,
    mixtral_config,
    qwen3_moe_config,
    random_sizes,
    save_random,
)
from cores import Ask, message, run, start_core
from enginecore.config import make_config
from enginecore.core.engine_core import EngineCore
from enginecore.executor.executor import make_executor
from enginecore.model_files import locate
from enginecore.worker.runner.program import StepLimits, layer_program
from pagedattn import KVLayout, allocate
from pagedattn.cpu_backend import arguments
from schedules import SCHEDULES, asks

CONFIGS = {
    "llama": llama_config(),
    "llama, biases and linear rope": llama_config(
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    ),
    "llama, dynamic rope": llama_config(
        max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    ),
    "mistral, a window": MistralConfig(**random_sizes(sliding_window=12)),
    "qwen2": Qwen2Config(**random_sizes()),
    "qwen3": Qwen3Config(**random_sizes(head_dim=24)),
    "phi3": Phi3Config(**random_sizes(pad_token_id=0)),
    "gemma": gemma_config(1),
    "gemma2": gemma_config(2),
    "gemma3": gemma_config(3),
    "gpt2": gpt2_config(),
    "starcoder2": Starcoder2Config(**random_sizes(use_bias=True)),
}


@pytest.fixture(scope="module", params=CONFIGS)
def model(request, tmp_path_factory):
    return save_random(CONFIGS[request.param], tmp_path_factory.mktemp("model"))


def answers(model, **options):
    core = start_core(model, **options)
    found = [answer.tokens for answer in run(core, asks())]
    return found, core


@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
def test_the_same_tokens(model, options, caplog):
    caplog.set_level(logging.INFO)
    found, _ = answers(model, **options)
    assert "the layers are one program" in caplog.text
    assert found == answers(model, enforce_eager=True, **options)[0]


def test_the_memory_that_is_set_aside_for_a_step_holds_it(model):
    decoder = model_steps.load(model)
    heads = decoder.kv_heads, decoder.spec.head_dim
    cache = allocate(KVLayout(len(decoder.layers), *heads, 16, torch.float32), 1)
    program = layer_program(decoder, cache, torch.float32, StepLimits(1000, 1, 16))
    alignment = 64
    assert program.nbytes - alignment <= 1000 * 4 * decoder.step_width <= 1.5 * program.nbytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_same_tokens_in_half_precision(dtype, tmp_path):
    path = save_random(llama_config(), tmp_path)
    assert answers(path, dtype=dtype)[0] == answers(path, dtype=dtype, enforce_eager=True)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [mixtral_config(), qwen3_moe_config()], ids=["mixtral", "qwen3_moe"])
def test_the_same_tokens_of_a_mixture_of_experts(config, dtype, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    found, core = answers(save_random(config, tmp_path), dtype=dtype)
    assert "the layers are one program" in caplog.text
    assert "segments: 1," in caplog.text
    eager, other = answers(tmp_path, dtype=dtype, enforce_eager=True)
    assert found == eager
    assert (core.expert_loads() == other.expert_loads()).all()


@pytest.mark.parametrize(
    ("config", "options", "segments"),
    [
        (llama_config(), {}, 6),  # an exchange after the embedding, and two in each of two layers
        pytest.param(mixtral_config(), {"enable_expert_parallel": True}, 6, marks=pytest.mark.slow),
    ],
    ids=["tensor parallel", "experts on two ranks"],
)
def test_the_same_tokens_on_two_ranks(config, options, segments, tmp_path, monkeypatch, capfd):
    """Worker processes run the program's segments, and exchange results between them."""
    monkeypatch.setattr(logging.getLogger("enginecore"), "level", logging.INFO)  # workers have it too
    path = save_random(config, tmp_path)
    found = []
    for enforce_eager in (False, True):
        given = make_config(
            {
                "model": str(path),
                "dtype": "float32",
                "device": "cpu",
                "num_blocks_override": 64,
                "tensor_parallel_size": 2,
                "enforce_eager": enforce_eager,
                **options,
            }
        )
        executor = make_executor(given, locate(given.model))
        found.append([answer.tokens for answer in run(EngineCore(given, executor), asks())])
        executor.shutdown()
        said = capfd.readouterr().err
        assert said.count(f"segments: {segments},") == (0 if enforce_eager else 2), said
    assert found[0] == found[1] == answers(path)[0]


class Dispatches(TorchDispatchMode):
    """Counts what reaches torch's dispatcher."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def counts_of_a_step(path, rows, monkeypatch):
    """Torch dispatches and kernels called one by one in a decode step of so many rows."""
    core = start_core(path, enable_prefix_caching=False)
    for number in range(rows):
        core.add(0, message(number, Ask([5, 6, number], 20)))
    for _ in range(3):
        core.step()
    called = []
    launch = arguments._octavo_run()
    monkeypatch.setattr(arguments, "_octavo_run", lambda: lambda *given: called.append(1) or launch(*given))
    with Dispatches() as dispatches:
        core.step()
    monkeypatch.undo()
    return dispatches.count, len(called)


@pytest.mark.parametrize("config", [llama_config, mixtral_config])
def test_a_step_does_not_grow_with_layers_and_rows(config, tmp_path, monkeypatch):
    """Nothing is timed: what a step asks of torch and of the kernels is counted."""
    two = save_random(config(), tmp_path / "two")
    six = save_random(config(num_hidden_layers=6), tmp_path / "six")
    alone = counts_of_a_step(two, 1, monkeypatch)
    assert counts_of_a_step(six, 1, monkeypatch) == alone
    assert counts_of_a_step(six, 16, monkeypatch) == alone
    dispatches, kernels = alone
    assert kernels == 1  # the head's product
    assert dispatches <= 21  # 17 in `Runner.run`, 4 to read its result
    assert torch.is_inference_mode_enabled() is False
