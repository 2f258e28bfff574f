"""Experts on ranks of their own give the tokens of one process, whatever placement they have."""

import json
import random
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import byte_tokenizer
from checkpoints import llama_config, mixtral_config, qwen3_moe_config, save_random
from collectives import ExpertPlacement, load_placements, save_placements
from cores import Ask, message, run, start_core
from enginecore import LLM, SamplingParams
from enginecore.config import make_config
from enginecore.core.engine_core import EngineCore
from enginecore.errors import ConfigError
from enginecore.executor.executor import make_executor
from enginecore.executor.step import empty_step
from enginecore.model_files import locate
from executors import Smaller, assert_same, options, ragged_asks

CONFIGS = {"mixtral": mixtral_config(), "qwen3_moe": qwen3_moe_config()}
TOOL = Path(__file__).parents[2] / "tools" / "expert_placement.py"
RANKS = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=CONFIGS)
def model(request, tmp_path_factory):
    path = save_random(CONFIGS[request.param], tmp_path_factory.mktemp(request.param))
    byte_tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def alone(model):
    """A core of one process, which has run `ragged_asks` and nothing else, and its answers."""
    core = start_core(model, enable_prefix_caching=False)
    return core, run(core, ragged_asks())


@pytest.fixture(scope="module", params=RANKS)
def executor(request, model):
    config = options(model, tensor_parallel_size=request.param, enable_expert_parallel=True)
    executor = make_executor(config, locate(config.model))
    yield executor
    executor.shutdown()


def test_tokens_and_loads_of_one_process(model, alone, executor):
    core, truth = alone
    before = executor.expert_loads()
    assert_same(run(EngineCore(options(model, enable_prefix_caching=False), executor), ragged_asks()), truth)
    loads = executor.expert_loads()
    assert loads.dtype == np.int64
    np.testing.assert_array_equal(loads - before, core.expert_loads())


def test_tokens_of_one_process_with_prefixes_from_the_cache(model, alone, executor):
    core = EngineCore(options(model), executor)
    assert_same(run(core, ragged_asks()), alone[1])
    again = run(core, ragged_asks())
    assert_same(again, alone[1])
    assert sum(answer.cached for answer in again) >= 16 * 5


def test_tokens_of_one_process_in_chunks_and_preempted(model, alone, executor):
    config = options(model, max_num_batched_tokens=16, max_num_seqs=8)
    core = EngineCore(config, Smaller(executor, num_blocks=5, max_model_len=80, depth=2))
    assert_same(run(core, ragged_asks()), alone[1])
    assert core.stats().preemptions > 0


def test_a_single_token_leaves_the_other_ranks_with_none(model, alone, executor):
    ask = [Ask([7], 12), Ask([250], 8, SamplingParams(temperature=1.0), seed=3)]
    for each in ask:
        core = EngineCore(options(model), executor)
        assert_same(run(core, [each]), run(start_core(model), [each]))


def test_loads_are_counted_once_and_from_the_first_request(tmp_path):
    path = save_random(mixtral_config(), tmp_path / "model")
    core = start_core(path)
    assert core.expert_loads().tolist() == [[0] * 5] * 2
    run(core, [Ask([1, 2, 3], 4)])
    # The last token is sampled and never run; each goes to two experts.
    assert core.expert_loads().sum(1).tolist() == [2 * (3 + 4 - 1)] * 2
    assert start_core(save_random(llama_config(), tmp_path / "dense")).expert_loads() is None


@pytest.mark.parametrize("unfinished", [None, False, True])
def test_a_step_without_rows_changes_nothing(folder, unfinished):
    """Between two steps of a request, on the only rank that has experts."""
    config = options(folder / "mixtral", enable_expert_parallel=True)
    executor = make_executor(config, locate(config.model))
    core = EngineCore(config, executor)
    core.add(0, message(0, Ask([1, 2, 3], 4)))
    tokens = []
    for _ in range(4):
        tokens += core.step()[0].tokens.tolist()
        loads = executor.expert_loads()
        executor.submit(empty_step(unfinished))
        output = executor.collect()
        assert (output.step, output.tokens.tolist(), output.unfinished) == (0, [], unfinished)
        np.testing.assert_array_equal(executor.expert_loads(), loads)
    assert tokens == run(start_core(folder / "mixtral"), [Ask([1, 2, 3], 4)])[0].tokens


def test_data_parallel_ranks_that_share_experts_are_not_started_one_by_one(folder):
    config = options(folder / "mixtral", enable_expert_parallel=True, data_parallel_size=2)
    with pytest.raises(ConfigError, match="ranks share experts, and this engine was started by itself"):
        make_executor(config, locate(config.model))
    with pytest.raises(ConfigError, match=r"inproc runs 1 rank by itself, .* 2 data-parallel ranks"):
        replace(config, distributed_executor_backend="inproc")


@pytest.mark.slow
def test_slices_of_experts_count_each_token_once(tmp_path):
    config = options(save_random(mixtral_config(), tmp_path / "model"), tensor_parallel_size=2)
    executor = make_executor(config, locate(config.model))
    run(EngineCore(config, executor), [Ask([1, 2, 3], 4)])
    assert executor.expert_loads().sum(1).tolist() == [12, 12]
    executor.shutdown()


@pytest.mark.slow
def test_from_loads_to_a_placement_with_a_copy_of_the_busiest(tmp_path, capsys):
    path = save_random(qwen3_moe_config(), tmp_path / "model")
    byte_tokenizer.save(path)
    plain = {"dtype": "float32", "device": "cpu", "enable_prefix_caching": False}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    rng = random.Random(1)
    prompts = [{"prompt_token_ids": [rng.randrange(256) for _ in range(n)]} for n in (1, 9, 30)]

    def tokens(llm):
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    spread = {"tensor_parallel_size": 2, "enable_expert_parallel": True, **plain}
    expected = tokens(LLM(str(path), **plain))
    llm = LLM(str(path), **spread)
    assert tokens(llm) == expected
    measured = llm.expert_loads()
    llm.shutdown()
    assert measured.sum(1).tolist() == [3 * (1 + 9 + 30 + 3 * 11)] * 2

    loads, placement = tmp_path / "loads.json", tmp_path / "placement.json"
    loads.write_text(json.dumps(measured.tolist()))
    tool = runpy.run_path(str(TOOL))
    assert tool["main"]([str(loads), str(placement), "--ranks", "2", "--redundant", "1"]) == 0
    assert "layer 1 with experts: " in capsys.readouterr().out
    for layer, of_layer in enumerate(load_placements(placement)):
        copied = [expert for expert in range(8) if all(expert in held for held in of_layer.ranks)]
        assert copied == [int(measured[layer].argmax())]

    llm = LLM(str(path), expert_placement=str(placement), **spread)
    assert tokens(llm) == expected
    assert np.array_equal(llm.expert_loads(), measured)
    llm.shutdown()


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        ("[]", [], "holds no loads"),
        ("[[1, 2], [1]]", [], "equally many a layer"),
        ("[[1, 2]]", ["--redundant", "3"], "2 experts on 2 ranks can have 0 to 2 redundant copies, got 3"),
        ("[[1, -2]]", [], "loads must be finite and not negative, got -2"),
        ("{", [], "expert_placement: "),
    ],
)
def test_loads_of_which_no_placement_can_be_made(tmp_path, capsys, content, more, message):
    (tmp_path / "loads.json").write_text(content)
    place = tmp_path / "placement.json"
    status = runpy.run_path(str(TOOL))["main"](
        [str(tmp_path / "loads.json"), str(place), "--ranks", "2", *more]
    )
    assert status == 2
    assert message in capsys.readouterr().err
    assert not place.exists()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("placements")
    save_random(mixtral_config(), folder / "mixtral")
    save_random(llama_config(), folder / "dense")
    save_placements(folder / "ranks", [ExpertPlacement.even(5, 2)])
    save_placements(folder / "experts", [ExpertPlacement.even(4, 1)])
    save_placements(folder / "layers", [ExpertPlacement.even(5, 1)] * 3)
    save_placements(folder / "good", [ExpertPlacement(5, ((4, 1, 0, 2, 3),))])
    (folder / "bad").write_text('{"num_experts": 5, "ranks": [[0, 1]]}')
    return folder


@pytest.mark.parametrize(
    ("model", "placement", "message"),
    [
        ("mixtral", "missing", r"expert_placement: .*No such file.*missing"),
        ("mixtral", "bad", r"expert_placement: .*/bad is no expert placement .*no rank of 1 holds"),
        ("mixtral", "ranks", "ranks is for 5 experts on 2 ranks, and here are 5 experts on 1 ranks"),
        ("mixtral", "experts", "experts is for 4 experts on 1 ranks, and here are 5 experts on 1 ranks"),
        ("mixtral", "layers", "has 3 layers, and the model 2 with experts: give as many, or one for all"),
        ("dense", "good", "enable_expert_parallel: the model has no experts"),
    ],
)
def test_placements_that_do_not_fit(folder, model, placement, message):
    given = {"enable_expert_parallel": True, "expert_placement": str(folder / placement)}
    with pytest.raises(ConfigError, match=message):
        start_core(folder / model, **given)


def test_a_placement_on_one_rank_is_only_an_order(folder):
    given = {"enable_expert_parallel": True, "expert_placement": str(folder / "good")}
    asks = ragged_asks()[:2]
    got = run(start_core(folder / "mixtral", **given), asks)
    assert_same(got, run(start_core(folder / "mixtral"), asks))


def test_a_placement_needs_whole_experts():
    with pytest.raises(ConfigError, match="expert_placement=x places whole experts: it needs enable_expert"):
        make_config({"expert_placement": "x"})
