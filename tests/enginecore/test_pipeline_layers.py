"""Layers are split so that no stage holds much more than the others."""

import itertools

import pytest

from checkpoints import gemma_config, gpt2_config, llama_config, qwen3_moe_config
from enginecore.worker.models.families import decoder_spec
from enginecore.worker.models.stages import split_layers


def spec(config, architecture):
    return decoder_spec({**config.to_dict(), "architectures": [architecture]})


def sizes(config, architecture, stages):
    split = split_layers(spec(config, architecture), stages)
    assert [layer for layers in split for layer in layers] == list(range(split[-1].stop))
    return [len(layers) for layers in split]


def llama(**changes):
    return llama_config(**changes), "LlamaForCausalLM"


def test_equal_layers_without_much_at_the_ends():
    assert sizes(*llama(num_hidden_layers=8, vocab_size=10), 4) == [2, 2, 2, 2]
    assert sorted(sizes(*llama(num_hidden_layers=10, vocab_size=10), 4)) == [2, 2, 3, 3]
    assert sizes(*llama(num_hidden_layers=3, vocab_size=10), 1) == [3]
    assert sizes(*llama(num_hidden_layers=3), 3) == [1, 1, 1]


def test_tables_take_the_place_of_layers():
    """A layer has 30,848 parameters: 64 · 64 · 2 + 64 · 32 · 2 for attention, 64 · 96 · 3, and two norms."""
    three_layers = 3 * 30_848 // 64
    assert sizes(*llama(num_hidden_layers=12, vocab_size=three_layers), 2) == [6, 6]
    assert sizes(*llama(num_hidden_layers=12, vocab_size=three_layers), 3) == [3, 6, 3]
    assert sizes(*llama(num_hidden_layers=12, vocab_size=20 * three_layers), 3) == [1, 10, 1]


def test_a_tied_table_is_at_both_ends():
    tied = gemma_config(1, num_hidden_layers=12, vocab_size=3000)
    assert sizes(tied, "GemmaForCausalLM", 3)[0] == sizes(tied, "GemmaForCausalLM", 3)[2] < 4


def test_learned_positions_are_at_the_front():
    config = gpt2_config(n_layer=12, vocab_size=10, n_positions=4 * 50_000 // 64)
    assert sizes(config, "GPT2LMHeadModel", 2) == [4, 8]


def test_layers_with_experts_weigh_more():
    config = qwen3_moe_config(
        num_hidden_layers=9, mlp_only_layers=[0, 1, 2, 3, 4, 5], vocab_size=10, num_experts=64
    )
    assert sizes(config, "Qwen3MoeForCausalLM", 3) == [7, 1, 1]


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_no_split_has_a_lighter_heaviest_stage(stages):
    """By trying all, where layers have 30,848 parameters and the ends 64 · vocabulary more."""
    for layers, vocab in itertools.product((5, 8, 11), (10, 700, 2000)):
        weights = [30_848] * layers
        weights[0] += 64 * vocab
        weights[-1] += 64 * vocab + 64
        ways = itertools.combinations(range(1, layers), stages - 1)
        best = min(heaviest(weights, way) for way in ways)
        counts = sizes(*llama(num_hidden_layers=layers, vocab_size=vocab), stages)
        assert heaviest(weights, [*itertools.accumulate(counts)][:-1]) == best


def heaviest(weights, cuts):
    ends = [*cuts, len(weights)]
    return max(sum(weights[start:end]) for start, end in zip([0, *cuts], ends, strict=True))


def test_more_stages_than_layers():
    with pytest.raises(ValueError, match="4 stages need at least a layer each, and the model has 3"):
        split_layers(spec(*llama(num_hidden_layers=3)), 4)
