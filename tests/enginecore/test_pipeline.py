"""Stages in worker processes: the tokens are those of one process."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from transformers import Qwen2Config

from checkpoints import (
    gemma_config,
    gpt2_config,
    llama_config,
    mixtral_config,
    random_sizes,
    save_random,
)
from cores import run, start_core
from enginecore.core.engine_core import EngineCore
from enginecore.errors import ConfigError
from enginecore.executor.executor import make_executor
from enginecore.model_files import locate
from enginecore.worker.models.families import decoder_spec
from enginecore.worker.models.stages import split_layers
from executors import Smaller, assert_same, options, ragged_asks

CONFIGS = {
    "llama": lambda: llama_config(num_hidden_layers=5),
    "qwen2": lambda: Qwen2Config(**random_sizes(initializer_range=0.4)),
    "gemma2": lambda: gemma_config(2),
    "gpt2": lambda: gpt2_config(n_layer=3),
    "mixtral": mixtral_config,
}


def grid(model, pp, tp=1, *, slow=False):
    return pytest.param((model, pp, tp), id=f"{model}-pp{pp}-tp{tp}", marks=[pytest.mark.slow] * slow)


CACHE_BYTES = 1 << 20

GRIDS = [
    grid("qwen2", 2),
    grid("llama", 3, slow=True),
    *(grid(model, 2, slow=True) for model in ("llama", "gemma2", "gpt2", "mixtral")),
    *(grid(model, 2, tp=2, slow=True) for model in ("llama", "qwen2", "gemma2", "gpt2")),
]


class Pipeline(NamedTuple):
    """A model, an executor of several stages for it, and what one process answers."""

    config: object
    executor: object
    truth: list
    expert_loads: object
    """Of the one process, after the answers."""


@pytest.fixture(scope="module", params=GRIDS)
def pipeline(request, tmp_path_factory):
    model, pp, tp = request.param
    path = save_random(CONFIGS[model](), tmp_path_factory.mktemp(model))
    config = options(
        path,
        pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
        swap_space=0.01,
        num_blocks_override=None,
        kv_cache_memory_bytes=CACHE_BYTES,
    )
    executor = make_executor(config, locate(config.model))
    assert (len(executor.pids), executor.depth) == (pp * tp, pp)
    alone = start_core(path, enable_prefix_caching=False)
    yield Pipeline(config, executor, run(alone, ragged_asks()), alone.expert_loads())
    executor.shutdown()


def test_tokens_of_one_process(pipeline):
    core = EngineCore(pipeline.config, pipeline.executor)
    assert_same(run(core, ragged_asks()), pipeline.truth)
    again = run(core, ragged_asks())
    assert_same(again, pipeline.truth)
    assert sum(answer.cached for answer in again) >= 16 * 5  # all but those that asked for prompt logprobs


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_tokens_of_one_process_in_chunks_and_preempted(pipeline, mode):
    config = replace(pipeline.config, max_num_batched_tokens=16, max_num_seqs=8, preemption_mode=mode)
    core = EngineCore(config, Smaller(pipeline.executor, num_blocks=5, max_model_len=80))
    assert_same(run(core, ragged_asks()), pipeline.truth)
    assert core.stats().preemptions > 0


def test_the_stage_with_most_layers_decides_the_number_of_blocks(pipeline):
    spec = decoder_spec(locate(pipeline.config.model).config)
    split = split_layers(spec, pipeline.config.pipeline_parallel_size)
    heads = spec.num_kv_heads // pipeline.config.tensor_parallel_size
    layer_bytes = 2 * heads * 16 * spec.head_dim * 4  # a block of 16 keys and values, in float32
    assert pipeline.executor.limits.num_blocks == CACHE_BYTES // (max(map(len, split)) * layer_bytes)


def test_experts_are_counted_on_all_stages(pipeline):
    core = EngineCore(replace(pipeline.config, enable_prefix_caching=False), pipeline.executor)
    before = core.expert_loads()
    assert_same(run(core, ragged_asks()), pipeline.truth)
    if pipeline.expert_loads is None:
        assert before is None
    else:
        np.testing.assert_array_equal(core.expert_loads() - before, pipeline.expert_loads)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size=3 is more than the 2 layers the model has"),
        ({"tensor_parallel_size": 200}, "tensor_parallel_size=200: .*200"),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "the model has no experts"),
    ],
)
def test_cuts_that_cannot_be_are_refused_before_there_is_a_process(tmp_path, monkeypatch, asked, message):
    start = "enginecore.executor.processes.start_processes"
    monkeypatch.setattr(start, lambda settings: pytest.fail("started"))
    path = save_random(llama_config(), tmp_path)
    config = options(path, **asked)
    with pytest.raises(ConfigError, match=message):
        make_executor(config, locate(config.model))
