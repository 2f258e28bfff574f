"""Every supported family gives transformers' logits and greedy tokens on a small random checkpoint."""

import json

import pytest
import torch
from transformers import MistralConfig, Phi3Config, Qwen2Config, Qwen3Config, Starcoder2Config

from checkpoints import (
    Oracle,
    gemma_config,
    gpt2_config,
    llama_config,
    mixtral_config,
    qwen3_moe_config,
    random_sizes,
    same_tokens,
    save_random,
)
from cores import Ask, run, start_core
from enginecore.errors import ModelError
from model_steps import load, run_stages

PROMPT = [(7 * i * i + 3 * i + 11) % 256 for i in range(40)]


def rope(**parameters):
    return {"rope_theta": 10000.0, **parameters}


YARN = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
LLAMA3 = rope(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)


def longrope(original):
    return rope(
        rope_type="longrope",
        short_factor=[1.0 + 0.1 * i for i in range(8)],
        long_factor=[1.0 + 0.7 * i for i in range(8)],
        original_max_position_embeddings=original,
    )


def phi3(**changes):
    return Phi3Config(**random_sizes(pad_token_id=0) | changes)


FAMILIES = {
    "llama": lambda: llama_config(),
    "llama tied": lambda: llama_config(tie_word_embeddings=True),
    "llama multi-head": lambda: llama_config(num_key_value_heads=4),
    "llama multi-query": lambda: llama_config(num_key_value_heads=1),
    "llama biases": lambda: llama_config(attention_bias=True, mlp_bias=True),
    "llama head_dim 80": lambda: llama_config(head_dim=80),
    "llama theta": lambda: llama_config(rope_parameters=rope(rope_type="default", rope_theta=500000.0)),
    "llama linear rope": lambda: llama_config(rope_parameters=rope(rope_type="linear", factor=2.5)),
    "llama yarn": lambda: llama_config(rope_parameters=YARN, initializer_range=0.3),
    "llama 3": lambda: llama_config(rope_parameters=LLAMA3),
    "mistral": lambda: MistralConfig(**random_sizes(), sliding_window=None),
    "mistral window": lambda: MistralConfig(**random_sizes(), sliding_window=9),
    "qwen2": lambda: Qwen2Config(**random_sizes()),
    "qwen2 window": lambda: Qwen2Config(
        **random_sizes(), use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**random_sizes(), head_dim=32),
    "qwen3 tied": lambda: Qwen3Config(**random_sizes(tie_word_embeddings=True), head_dim=16),
    "llama dynamic rope": lambda: llama_config(rope_parameters=rope(rope_type="dynamic", factor=2.0)),
    "phi3": phi3,
    "phi3 window": lambda: phi3(sliding_window=9),
    "phi3 partial rotary": lambda: phi3(rope_parameters=rope(rope_type="default", partial_rotary_factor=0.5)),
    "phi3 short": lambda: phi3(rope_parameters=longrope(512), original_max_position_embeddings=512),
    "phi3 long": lambda: phi3(rope_parameters=longrope(32), original_max_position_embeddings=32),
    "gpt2": lambda: gpt2_config(),
    "gpt2 untied": lambda: gpt2_config(tie_word_embeddings=False, n_inner=80, activation_function="gelu"),
    "starcoder2": lambda: Starcoder2Config(**random_sizes(tie_word_embeddings=True), sliding_window=9),
    "starcoder2 untied": lambda: Starcoder2Config(**random_sizes(), sliding_window=None),
    "gemma": lambda: gemma_config(1),
    "gemma multi-query": lambda: gemma_config(1, num_key_value_heads=1, attention_bias=True),
    "gemma2": lambda: gemma_config(2, attn_logit_softcapping=8.0, final_logit_softcapping=5.0),
    "gemma2 uncapped": lambda: gemma_config(2, attn_logit_softcapping=None, final_logit_softcapping=None),
    "gemma3": lambda: gemma_config(3),
    "mixtral": lambda: mixtral_config(),
    "mixtral window": lambda: mixtral_config(sliding_window=9, num_experts_per_tok=1),
    "qwen3 moe": lambda: qwen3_moe_config(),
    "qwen3 moe sparse step": lambda: qwen3_moe_config(
        mlp_only_layers=[], decoder_sparse_step=2, norm_topk_prob=False
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_tokens(family, tmp_path):
    path = save_random(FAMILIES[family](), tmp_path)
    oracle = Oracle(path)
    expected = oracle.logits(PROMPT)
    spread = float(expected.std())
    # The oracle's own float32 is off by up to half of 1e-4 from its float64, and so, elsewhere, are we.
    torch.testing.assert_close(logits(path, PROMPT), expected, atol=2e-4 * spread, rtol=0)
    answer = run(start_core(path), [Ask(PROMPT, 40)])[0]
    assert same_tokens(answer.tokens, *oracle.greedy(PROMPT, 40))


def logits(path, ids, **options):
    return run_stages([load(path, **options)], ids, prefill=len(ids))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "qwen3 moe"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(family, tmp_path):
    path = save_random(FAMILIES[family](), tmp_path)
    exact = Oracle(path).logits(PROMPT)
    theirs = Oracle(path, dtype=torch.bfloat16).logits(PROMPT).float() - exact
    ours = logits(path, PROMPT, dtype=torch.bfloat16).float() - exact
    assert ours.square().mean() < 2 * theirs.square().mean()


@pytest.mark.parametrize("scaling", ["type", "rope_type"])
def test_older_configs_name_rope_and_dtype_at_top_level(scaling, tmp_path):
    path = save_random(llama_config(rope_parameters=LLAMA3), tmp_path)
    expected = logits(path, PROMPT)
    config = json.loads((path / "config.json").read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = int(parameters.pop("rope_theta"))
    config["rope_scaling"] = {scaling: parameters.pop("rope_type"), **parameters}
    config["torch_dtype"] = config.pop("dtype")
    (path / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(logits(path, PROMPT), expected, atol=0, rtol=0)


def test_older_configs_of_gemma3_name_no_kinds(tmp_path):
    path = save_random(gemma_config(3, layer_types=["sliding_attention", "full_attention"] * 2), tmp_path)
    expected = logits(path, PROMPT)
    config = json.loads((path / "config.json").read_text())
    thetas = config.pop("rope_parameters")
    config["rope_theta"] = thetas["full_attention"]["rope_theta"]
    config["rope_local_base_freq"] = thetas["sliding_attention"]["rope_theta"]
    del config["layer_types"], config["tie_word_embeddings"]
    config["sliding_window_pattern"] = 2
    (path / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(logits(path, PROMPT), expected, atol=0, rtol=0)


@pytest.mark.parametrize("kind", ["su", "yarn"])
def test_older_configs_of_phi3_have_other_words_for_longrope(kind, tmp_path):
    path = save_random(FAMILIES["phi3 long"](), tmp_path)
    expected = logits(path, PROMPT)
    config = json.loads((path / "config.json").read_text())
    parameters = config.pop("rope_parameters")
    factors = {name: parameters[name] for name in ("short_factor", "long_factor")}
    config["rope_scaling"] = {"type": kind, **factors}
    (path / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(logits(path, PROMPT), expected, atol=0, rtol=0)


def test_longrope_goes_by_the_longest_sequence_there_can_be(tmp_path):
    path = save_random(FAMILIES["phi3 long"](), tmp_path)
    short = PROMPT[:30]
    expected = Oracle(path).logits(short)
    torch.testing.assert_close(logits(path, short, max_positions=32), expected, atol=1e-3, rtol=0)
    assert not torch.allclose(logits(path, short, max_positions=33), expected, atol=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported"),
        ({"rope_parameters": {"rope_type": "extended"}}, "rope scaling 'extended' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "needs factor"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1] * 8, "long_factor": [1] * 7}},
            "long_factor has 7 entries, not one for each pair of the 16",
        ),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "3 is no multiple"),
        ({"hidden_size": None}, "config.json lacks hidden_size"),
    ],
)
def test_what_is_not_supported_is_named(changes, message, tmp_path):
    path = save_random(llama_config(), tmp_path)
    config = json.loads((path / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        logits(path, PROMPT)


def test_starcoder2_without_biases(tmp_path):
    path = save_random(Starcoder2Config(**random_sizes(use_bias=False), sliding_window=None), tmp_path)
    torch.testing.assert_close(logits(path, PROMPT), Oracle(path).logits(PROMPT), atol=2e-3, rtol=0)


LONGER = [(5 * i * i + 3 * i + 7) % 256 for i in range(150)]


@pytest.mark.parametrize(
    ("parameters", "longest"),
    [
        (rope(rope_type="linear", factor=4.0), 256),
        (rope(rope_type="dynamic", factor=4.0), 256),
        (rope(rope_type="yarn", factor=4.0), 256),
        (rope(rope_type="yarn", factor=8.0, original_max_position_embeddings=32), 256),
        (LLAMA3, 64),
    ],
)
def test_scaling_says_how_long_a_sequence_may_be(parameters, longest, tmp_path):
    """Linear, dynamic and yarn stretch the original length by their factor, llama3 says the stretched one."""
    path = save_random(llama_config(rope_parameters=parameters, max_position_embeddings=64), tmp_path)
    core = start_core(path, num_blocks_override=20)
    assert core.limits.max_model_len == longest


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
@pytest.mark.parametrize("length", [30, 62, 100])
def test_greedy_tokens_beyond_the_original_length(kind, length, tmp_path):
    """Also where the prompt comes in chunks, and where the sequence outgrows the original length of 64."""
    parameters = rope(rope_type=kind, factor=4.0)
    path = save_random(llama_config(rope_parameters=parameters, max_position_embeddings=64), tmp_path)
    prompt = LONGER[:length]
    core = start_core(path, max_num_batched_tokens=24, num_blocks_override=40)
    answers = run(core, [Ask(prompt, 50), Ask(LONGER[10:30], 50)])
    for ask, answer in ((prompt, answers[0]), (LONGER[10:30], answers[1])):
        assert same_tokens(answer.tokens, *Oracle(path).greedy(ask, 50))


def test_dynamic_rope_shares_no_prefix_beyond_the_original_length(tmp_path):
    parameters = rope(rope_type="dynamic", factor=4.0)
    path = save_random(llama_config(rope_parameters=parameters, max_position_embeddings=64), tmp_path)
    core = start_core(path, num_blocks_override=60)
    first, longer = run(core, [Ask(LONGER[:100], 10)])[0], run(core, [Ask(LONGER[:120], 10)])[0]
    assert (first.cached, longer.cached) == (0, 0)
    assert same_tokens(longer.tokens, *Oracle(path).greedy(LONGER[:120], 10))
    short, again = run(core, [Ask(LONGER[:60], 20)])[0], run(core, [Ask(LONGER[:60], 20)])[0]
    assert (short.cached, again.cached) == (0, 48)
    assert again.tokens == short.tokens


def test_dynamic_rope_after_a_preemption(tmp_path):
    """Four requests of 130 tokens do not fit in 24 blocks of 16 at once."""
    parameters = rope(rope_type="dynamic", factor=4.0)
    path = save_random(llama_config(rope_parameters=parameters, max_position_embeddings=64), tmp_path)
    core = start_core(path, num_blocks_override=24)
    prompts = [LONGER[i : i + 40 + 20 * i] for i in range(4)]
    answers = run(core, [Ask(prompt, 90) for prompt in prompts])
    assert core.stats().preemptions > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert same_tokens(answer.tokens, *Oracle(path).greedy(prompt, 90))
