"""Every supported family gives transformers' logits and greedy tokens on a small random checkpoint."""

import json

import pytest
import torch
from transformers import MistralConfig, Qwen2Config, Qwen3Config

from checkpoints import Oracle, llama_config, random_sizes, same_tokens, save_random
from collectives import LocalCommunicator
from cores import Ask, run, start_core
from enginecore.errors import ModelError
from enginecore.model_files import locate
from enginecore.models.loading import load_decoder
from pagedattn import KVLayout, allocate, build_batch

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
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_tokens(family, tmp_path):
    path = save_random(FAMILIES[family](), tmp_path)
    oracle = Oracle(path)
    torch.testing.assert_close(logits(path, PROMPT), oracle.logits(PROMPT), atol=1e-4, rtol=1e-4)
    answer = run(start_core(path), [Ask(PROMPT, 40)])[0]
    assert same_tokens(answer.tokens, *oracle.greedy(PROMPT, 40))


def logits(path, ids):
    files = locate(str(path))
    device = torch.device("cpu")
    model = load_decoder(files, LocalCommunicator(), dtype=torch.float32, device=device, max_positions=512)
    spec = model.spec
    cache = allocate(KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, 16, torch.float32), 4)
    batch = build_batch([len(ids)], [len(ids)], [[2, 0, 3]], block_size=16)
    with torch.inference_mode():
        return model.logits(model(torch.tensor(ids), torch.arange(len(ids)), cache, batch))


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported"),
        ({"rope_parameters": {"rope_type": "extended"}}, "rope scaling 'extended' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "needs factor"),
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
