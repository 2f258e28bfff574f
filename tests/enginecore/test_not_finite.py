"""Logits that are not a number end their request with an error, and no other."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import byte_tokenizer
from checkpoints import Oracle, llama_config, same_tokens, save_random
from cores import Ask, message, run, start_core
from enginecore import LLM, SamplingParams
from enginecore.config import make_config
from enginecore.core.drafts import Drafts
from enginecore.core.engine_core import EngineCore
from enginecore.executor.inproc import InprocExecutor
from enginecore.model_files import locate

POISON = 7
"""The token whose embedding is NaN."""

LOOKUP = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}

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
@pytest.mark.parametrize("drafts", [None, LOOKUP], ids=["plain", "drafts"])
def test_the_request_ends_and_its_neighbours_do_not_notice(
    backend, temperature, drafts, whole, poisoned, monkeypatch
):
    """Also those that get its blocks afterwards: there are too few for all to have fresh ones."""
    monkeypatch.setenv("OCTAVO_ATTENTION_BACKEND", backend)
    options = {"num_blocks_override": 14, "max_model_len": 80, "speculative_config": drafts}
    llm = LLM(str(poisoned), dtype="float32", device="cpu", **options)
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


class Poison:
    """Proposes the poison and what else it is told, in all rows."""

    def __init__(self, *drafts):
        self._drafts = np.array(drafts, np.int32)

    def begin(self, row):
        pass

    def propose(self, rows, tokens, num_tokens):
        return Drafts(rows, np.tile(self._drafts, (len(rows), 1)))


def drafting_core(path, *drafts):
    speculation = LOOKUP | {"num_speculative_tokens": 64}  # so that steps of several rows have them all
    config = make_config(
        {"model": str(path), "dtype": "float32", "device": "cpu", "speculative_config": speculation}
    )
    return EngineCore(config, InprocExecutor(config, locate(config.model)), proposer=Poison(*drafts))


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_rejected_draft_without_logits_changes_nothing(backend, poisoned, monkeypatch):
    monkeypatch.setenv("OCTAVO_ATTENTION_BACKEND", backend)
    params = SamplingParams(temperature=0, logit_bias={POISON: -100.0}, logprobs=1)
    asks = [Ask(prompt, 20, params) for prompt in GOOD]
    core = drafting_core(poisoned, 30, POISON, POISON)
    assert run(core, asks) == run(start_core(poisoned), asks)
    assert core.stats().num_draft_tokens > 100


def test_tokens_before_an_accepted_draft_without_logits_are_delivered(poisoned):
    """Token 9 is the likeliest, and once it has been generated the poison is."""
    params = SamplingParams(temperature=0, logit_bias={9: 100.0, POISON: 60.0}, repetition_penalty=5.0)
    delivered = []
    for core in (start_core(poisoned), drafting_core(poisoned, POISON, 30)):
        core.add(0, message(0, Ask(GOOD[0], 20, params)))
        tokens, errors = [], []
        while core.has_work:
            for outputs in core.step().values():
                tokens += outputs.tokens.tolist()
                errors += outputs.errors.values()
        core.check()
        delivered.append((tokens, errors))
    assert delivered[0] == delivered[1]
    assert delivered[0][0] == [9, POISON]
    assert ["NaN or infinite" in error for error in delivered[0][1]] == [True]
