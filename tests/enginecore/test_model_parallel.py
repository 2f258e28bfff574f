"""Models spread over two real processes give the logits of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpoints import (
    gemma_config,
    gpt2_config,
    llama_config,
    mixtral_config,
    qwen3_moe_config,
    save_random,
)
from collectives import ExpertPlacement, LocalCommunicator
from enginecore.errors import ModelError
from model_steps import load, run_stages

HERE = Path(__file__).parent
WORLD = 2
LIMIT_S = 120

# Three tokens follow one by one, so that one of two ranks has no token to take to its experts.
IDS = [(5 * i * i + i + 3) % 256 for i in range(23)]
OTHER = [(11 * i * i + 7) % 256 for i in range(23)]

MODELS = {
    "gpt2": lambda: gpt2_config(),
    "gemma2": lambda: gemma_config(2, initializer_range=0.2),
    "gemma3": lambda: gemma_config(3, num_key_value_heads=1),
    "llama": lambda: llama_config(
        hidden_size=96, num_attention_heads=6, num_key_value_heads=3, head_dim=16, vocab_size=321
    ),
    "mixtral": lambda: mixtral_config(intermediate_size=95),
    "qwen3_moe": lambda: qwen3_moe_config(),
}


def spread(model, *, tp=WORLD, experts=None, num_experts=0, ids=(IDS, IDS)):
    return {"model": model, "tp": tp, "experts": experts, "num_experts": num_experts, "ids": ids}


CASES = {
    "gpt2 tensor": spread("gpt2"),
    "gemma2 tensor": spread("gemma2"),
    "gemma3 tensor, one KV head": spread("gemma3"),
    "llama tensor, three KV heads": spread("llama"),
    "mixtral tensor": spread("mixtral"),
    "qwen3_moe tensor": spread("qwen3_moe"),
    "mixtral experts": spread("mixtral", experts=[[0, 1, 2], [3, 4]], num_experts=5),
    "qwen3_moe experts with copies": spread(
        "qwen3_moe", experts=[[6, 0, 1, 2, 3], [3, 4, 5, 6, 7]], num_experts=8
    ),
    "qwen3_moe experts over replicas": spread(
        "qwen3_moe", tp=1, experts=[[0, 1, 2, 3], [4, 5, 6, 7]], num_experts=8, ids=(IDS, OTHER)
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints, and what each rank made of them."""
    folder = tmp_path_factory.mktemp("spread")
    for name, config in MODELS.items():
        save_random(config(), folder / name)
    (folder / "cases.json").write_text(json.dumps(CASES))
    run_ranks(folder)
    return folder


def run_ranks(folder):
    paths = [str(HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    processes = []
    try:
        for rank in range(WORLD):
            command = [sys.executable, str(HERE / "model_rank.py"), str(rank), str(WORLD), str(folder)]
            with (folder / f"{rank}.stderr").open("wb") as stderr:
                processes.append(subprocess.Popen(command, stderr=stderr, env=environment))
        for rank, process in enumerate(processes):
            assert process.wait(LIMIT_S) == 0, (folder / f"{rank}.stderr").read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def ranks(folder):
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_one_process(case, folder, ranks):
    whole = load(folder / CASES[case]["model"])
    for rank, found in enumerate(ranks):
        expected = run_stages([whole], CASES[case]["ids"][rank], prefill=20)
        tolerance = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(found[case]["logits"], expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_the_recorded_layers_give_the_bits_of_their_modules(case, ranks):
    for found in ranks:
        assert torch.equal(found[case]["recorded"], found[case]["logits"])


def test_a_program_has_a_host_call_for_each_exchange(ranks):
    calls = {case: [found[case]["host_calls"] for found in ranks] for case in CASES}
    # After the embedding, and in each layer after attention and after the feed-forward network.
    assert calls["gpt2 tensor"] == [1 + 2 * 2] * 2
    assert calls["gemma2 tensor"] == [1 + 2 * 4] * 2
    assert calls["mixtral tensor"] == [1 + 2 * 2] * 2
    assert calls["mixtral experts"] == [1 + 2 * 2] * 2
    assert calls["qwen3_moe experts with copies"] == [1 + 2 * 3] * 2
    assert calls["qwen3_moe experts over replicas"] == [2] * 2  # two layers of three have experts


@pytest.mark.parametrize("case", ["mixtral tensor", "mixtral experts"])
def test_experts_are_cut_or_held_by_one_rank(case, ranks):
    layers, hidden, inner = 2, 64, 95
    whole = layers * 3 * hidden * inner
    held = {"mixtral tensor": [48 / 95 * 5, 47 / 95 * 5], "mixtral experts": [3, 2]}[case]
    assert [found[case]["elements"] for found in ranks] == [round(share * whole) for share in held]


def test_key_heads_are_cut_or_replicated(ranks):
    heads = {case: [found[case]["kv_heads"] for found in ranks] for case in CASES}
    assert heads["gpt2 tensor"] == [2, 2]
    assert heads["gemma3 tensor, one KV head"] == [1, 1]
    assert heads["llama tensor, three KV heads"] == [2, 1]
    assert heads["qwen3_moe experts over replicas"] == [2, 2]


def test_loads_count_each_token_once_with_expert_parallelism(ranks):
    spread_over_both = [found["qwen3_moe experts with copies"]["loads"] for found in ranks]
    single = [found["qwen3_moe tensor"]["loads"] for found in ranks]
    assert single[0].shape == (2, 8)
    assert single[0].sum(1).tolist() == [3 * len(IDS)] * 2
    assert torch.equal(single[0], single[1])
    assert torch.equal(sum(spread_over_both), single[0])
    assert ranks[0]["gpt2 tensor"]["loads"] is None


def test_a_placement_for_another_model_is_refused(folder):
    with pytest.raises(ModelError, match="the placement is for 4 experts, and the model has 5"):
        load(folder / "mixtral", ep=LocalCommunicator(), placements=(ExpertPlacement.even(4, 1),))


def test_more_ranks_than_heads_can_serve_are_refused(folder):
    five = LocalCommunicator()
    five.size = 5
    with pytest.raises(ModelError, match=r"4 query heads .*cannot be cut for 5 ranks"):
        load(folder / "gpt2", five)


def test_a_placement_for_other_ranks_is_refused(folder):
    with pytest.raises(ModelError, match="the placement is for 2 ranks, and the group has 1"):
        load(folder / "mixtral", ep=LocalCommunicator(), placements=(ExpertPlacement.even(5, 2),))


def test_expert_parallelism_needs_a_placement(folder):
    with pytest.raises(ValueError, match="both a communicator and a placement"):
        load(folder / "mixtral", ep=LocalCommunicator())
