"""Logits that are not a number end their request with an error, and no other."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import byte_tokenizer
from checkpoints import Oracle, llama_config, same_tokens, save_random
from enginecore import LLM, SamplingParams

POISON = 7
"""The token whose embedding is NaN."""

GOOD = [[20 + (3 * i * i + n) % 90 for i in range(10 + 9 * n)] for n in range(3)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return save_random(llama_config(), tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def poisoned(whole, tmp_path_factory):
    path = tmp_path_factory.mktemp("poisoned")
    tensors = load_file(whole / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text((whole / "config.json").read_text())
    byte_tokenizer.save(path)
    return path


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_request_ends_and_its_neighbours_do_not_notice(
    backend, temperature, whole, poisoned, monkeypatch
):
    """Also those that get its blocks afterwards: there are too few for all to have fresh ones."""
    monkeypatch.setenv("OCTAVO_ATTENTION_BACKEND", backend)
    llm = LLM(str(poisoned), dtype="float32", device="cpu", num_blocks_override=14, max_model_len=80)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, bad_words=["\x07"])
    bad = SamplingParams(temperature=temperature, max_tokens=8, seed=1, logprobs=2)
    prompts = [GOOD[0], [*GOOD[1], POISON, 30], GOOD[2], [POISON]]
    for _ in range(3):
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], [greedy, bad, greedy, bad])
        for index in (1, 3):
            answer = outputs[index].outputs[0]
            assert (answer.finish_reason, answer.token_ids) == ("error", [])
            assert "NaN or infinite" in str(answer.stop_reason)
        for index in (0, 2):
            answer = outputs[index].outputs[0]
            assert answer.finish_reason == "length"
            assert same_tokens(answer.token_ids, *Oracle(whole).greedy(prompts[index], 12))
        assert llm.llm_engine.stats().kv_cache_usage == 0
