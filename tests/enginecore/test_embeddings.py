"""Embeddings equal transformers' hidden states, whatever runs beside them and however prompts are cut."""

import random
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import byte_tokenizer
from checkpoints import Oracle, gemma_config, gpt2_config, llama_config, qwen3_moe_config, save_random
from enginecore import LLM, PoolingParams, Request, SamplingParams
from enginecore.errors import ContextLengthError, RequestError
from enginecore.frontend.request import Prompt

LENGTH = 128
WHOLE = PoolingParams(use_activation=False)


class Vectors(Oracle):
    """Hidden states after the final norm, pooled by numpy."""

    @torch.inference_mode()
    def pooled(self, ids, kind="last"):
        found = self.model(torch.tensor([list(ids)]), output_hidden_states=True)
        states = found.hidden_states[-1][0].double().numpy()
        return states[-1] if kind == "last" else states.mean(0)


def unit(vector):
    return vector / np.linalg.norm(vector)


def cosine(one, other):
    return float(unit(np.array(one, np.float64)) @ unit(np.array(other, np.float64)))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_random(llama_config(), tmp_path_factory.mktemp("m-rand"))
    byte_tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def oracle(model):
    return Vectors(model)


@pytest.fixture(scope="module")
def llm(model):
    return LLM(str(model), dtype="float32", device="cpu", max_model_len=LENGTH)


def nothing_left(llm):
    stats = llm.llm_engine.stats()
    llm.llm_engine._core.check()
    return (stats.running, stats.waiting, stats.kv_cache_usage) == (0, 0, 0)


def prompts_of(seed, count, most=110):
    """Prompts of all lengths, some of which begin alike."""
    draw = random.Random(seed)
    shared = [draw.randrange(256) for _ in range(48)]
    found = []
    for _ in range(count):
        own = [draw.randrange(256) for _ in range(draw.randint(1, most - len(shared)))]
        found.append(shared + own if draw.random() < 0.4 else own)
    return found


def run_mixed(llm, wanted):
    """Run (ids, pooling or None to generate) together, added in turns; return their outputs in order."""
    engine, outputs = llm.llm_engine, {}
    draw = random.Random(len(wanted))
    waiting = list(enumerate(wanted))
    while waiting or engine.has_unfinished_requests():
        for number, (ids, kind) in waiting[: draw.randint(0, 4)]:
            request_id, prompt = str(number), Prompt(None, list(ids))
            if kind is None:
                params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
                engine.add(Request(request_id, prompt, params))
            else:
                plan = engine.frontend.pooling_plan(PoolingParams(pooling_type=kind, use_activation=False))
                engine.add(Request.to_pool(request_id, prompt, plan))
            waiting = waiting[1:]
        for output in engine.step():
            if output.finished:
                outputs[int(output.request_id)] = output
    return [outputs[number] for number in range(len(wanted))]


@pytest.mark.parametrize("kind", ["last", "mean"])
@pytest.mark.parametrize("normalised", [True, False])
def test_embeddings_are_transformers_hidden_states(llm, oracle, kind, normalised):
    texts = ["a", "bcd", "\n", "bcd", "x" * LENGTH]
    params = PoolingParams(pooling_type=kind.upper(), use_activation=normalised)
    outputs = llm.embed(texts, pooling_params=params)
    for text, output in zip(texts, outputs, strict=True):
        right = oracle.pooled(text.encode(), kind)
        assert output.prompt_token_ids == list(text.encode())
        assert output.outputs.hidden_size == 64
        np.testing.assert_allclose(
            output.outputs.embedding, unit(right) if normalised else right, rtol=0, atol=1e-5
        )
    assert all(type(number) is float for number in outputs[0].outputs.embedding)
    assert nothing_left(llm)


@pytest.mark.parametrize(
    "config", [lambda: gpt2_config(), lambda: gemma_config(2), lambda: qwen3_moe_config()]
)
def test_other_families(config, tmp_path):
    path = save_random(config(), tmp_path)
    llm, oracle = LLM(str(path), dtype="float32", device="cpu", max_num_batched_tokens=8), Vectors(path)
    for kind in ("last", "mean"):
        params = PoolingParams(pooling_type=kind)
        for output in llm.embed([[5], list(range(3, 40))], pooling_params=params):
            right = oracle.pooled(output.prompt_token_ids, kind)
            assert cosine(output.outputs.embedding, right) > 1 - 1e-6


@pytest.mark.parametrize(
    ("options", "depth"),
    [
        ({}, 1),
        ({"max_num_batched_tokens": 16}, 1),
        ({"long_prefill_token_threshold": 5}, 2),
        ({"max_num_batched_tokens": 24, "max_num_seqs": 4}, 3),
        ({"enable_prefix_caching": False, "max_num_batched_tokens": 40}, 2),
        ({"enforce_eager": True, "max_num_batched_tokens": 40}, 1),
        ({"num_blocks_override": 20, "max_num_batched_tokens": 16}, 1),
        ({"num_blocks_override": 20, "max_num_batched_tokens": 16}, 2),
    ],
    ids=str,
)
def test_beside_generation_in_chunks_of_any_size(model, oracle, llm, options, depth):
    engine = LLM(str(model), dtype="float32", device="cpu", max_model_len=LENGTH, **options)
    engine.llm_engine._core._executor.depth = depth
    kinds = ["last", "mean", None]
    wanted = [(ids, kinds[place % 3]) for place, ids in enumerate(prompts_of(depth, 36))]
    outputs = run_mixed(engine, wanted)
    alone = iter(llm.generate([ids for ids, kind in wanted if kind is None], greedy(12), use_tqdm=False))
    for (ids, kind), output in zip(wanted, outputs, strict=True):
        if kind is None:
            assert output.outputs[0].token_ids == next(alone).outputs[0].token_ids
            assert output.embedding is None
            continue
        assert cosine(output.embedding, oracle.pooled(ids, kind)) > 1 - 1e-6
        assert np.linalg.norm(output.embedding - oracle.pooled(ids, kind)) < 1e-3
        assert output.outputs[0].token_ids == []
        assert output.outputs[0].finish_reason == "stop"
        assert kind == "last" or output.num_cached_tokens == 0
    assert nothing_left(engine)


def greedy(count):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_in_the_middle_of_a_prompt(model, oracle, mode, depth):
    options = {"preemption_mode": mode, "swap_space": 0.01 if mode == "swap" else 0}
    llm = LLM(
        str(model),
        dtype="float32",
        device="cpu",
        max_model_len=LENGTH,
        max_num_batched_tokens=16,
        max_num_seqs=1,
        scheduling_policy="priority",
        **options,
    )
    engine = llm.llm_engine
    engine._core._executor.depth = depth
    draw = random.Random(5)
    wanted = {
        str(number): ([draw.randrange(256) for _ in range(100)], ["last", "mean"][number % 2])
        for number in range(10)
    }
    outputs = {}
    # Each is wanted sooner than all that run, and comes while they are in the middle of their prompts.
    for priority, (request_id, (ids, kind)) in enumerate(wanted.items()):
        plan = engine.frontend.pooling_plan(PoolingParams(pooling_type=kind, use_activation=False))
        engine.add(Request.to_pool(request_id, Prompt(None, ids), plan, -priority))
        for _ in range(4):
            outputs |= {output.request_id: output for output in engine.step()}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    assert engine.stats().preemptions >= 5
    for request_id, (ids, kind) in wanted.items():
        assert np.linalg.norm(outputs[request_id].embedding - oracle.pooled(ids, kind)) < 1e-3
    assert nothing_left(llm)


def test_cached_prefixes_serve_last_pooling_and_not_the_mean(model, oracle):
    llm = LLM(str(model), dtype="float32", device="cpu", max_model_len=LENGTH)
    ids = prompts_of(3, 1)[0] * 2 + list(range(90))
    ids = ids[:100]
    cached = {}
    for kind in ("last", "last", "mean", "mean"):
        output = llm.embed([ids], pooling_params=PoolingParams(pooling_type=kind))[0]
        cached.setdefault(kind, []).append(output.num_cached_tokens)
        assert cosine(output.outputs.embedding, oracle.pooled(ids, kind)) > 1 - 1e-6
    assert cached == {"last": [0, 96], "mean": [0, 0]}
    afresh = PoolingParams(skip_reading_prefix_cache=True)
    assert llm.embed([ids], pooling_params=afresh)[0].num_cached_tokens == 0


def test_an_embedding_samples_nothing(model):
    """Unseeded requests draw as they would without embeddings before them, which make no logits."""
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    answers = []
    for embeds in (False, True):
        llm = LLM(str(model), dtype="float32", device="cpu", max_model_len=LENGTH)
        runner = llm.llm_engine._core._executor._worker._runner
        runner._model.logits = logits = Mock(wraps=runner._model.logits)
        if embeds:
            llm.embed(["abc", "de"])
            logits.assert_not_called()
        answers.append([output.outputs[0].token_ids for output in llm.generate(["x", "y"], params)])
    assert answers[0] == answers[1]


def test_metrics_count_them(model):
    llm = LLM(str(model), dtype="float32", device="cpu", max_model_len=LENGTH)

    def value(name, **labels):
        found = [m for m in llm.get_metrics() if m.name == f"octavo_{name}"]
        return sum(m.value for m in found if labels.items() <= m.labels.items())

    llm.embed(["abc", "de"])
    llm.embed(["f"], pooling_params=PoolingParams(pooling_type="mean"))
    assert value("prompt_tokens_total") == 6
    assert value("generation_tokens_total") == 0
    assert value("request_success_total", finished_reason="stop") == 3
    stats = llm.llm_engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (6, 0)
    llm.generate(["abc"], greedy(5))
    assert value("generation_tokens_total") == 5
    assert llm.llm_engine.stats().generation_tokens == 5


def test_scores_are_cosines(llm, oracle):
    texts = ["abc", "abd", "xyz!"]
    vectors = [unit(oracle.pooled(text.encode())) for text in texts]
    one = llm.score("abc", "abd")
    assert [output.outputs.score for output in one] == [pytest.approx(vectors[0] @ vectors[1], abs=1e-6)]
    assert one[0].prompt_token_ids == list(b"abcabd")
    many = llm.score("abc", texts)
    assert [m.outputs.score for m in many] == pytest.approx([vectors[0] @ v for v in vectors], abs=1e-6)
    each = llm.score(texts, texts[::-1])
    right = [a @ b for a, b in zip(vectors, vectors[::-1], strict=True)]
    assert [output.outputs.score for output in each] == pytest.approx(right, abs=1e-6)
    for first, second in ((["a", "b"], "c"), (["a", "b"], ["c", "d", "e"]), ([], "a"), ("a", [])):
        with pytest.raises(RequestError, match=r"text_1|text_2"):
            llm.score(first, second)


def test_what_cannot_be_embedded_is_refused_before_anything_runs(llm):
    before = llm.llm_engine.stats().ran_tokens
    for prompts in (["ok", ""], [[]], [[1, 320]], [[-1]], 7, ["ok", None]):
        with pytest.raises(RequestError):
            llm.embed(prompts)
    with pytest.raises(ContextLengthError, match="it has 129 tokens"):
        llm.embed("x" * 129)
    for params in (
        PoolingParams(dimensions=32),
        PoolingParams(pooling_type="mean", skip_reading_prefix_cache=False),
        [PoolingParams()] * 3,
        SamplingParams(),
    ):
        with pytest.raises(RequestError):
            llm.embed(["a"], pooling_params=params)
    assert llm.llm_engine.stats().ran_tokens == before
    assert nothing_left(llm)


def test_truncation(llm):
    def ids(text, count):
        return llm.embed(text, truncate_prompt_tokens=count)[0].prompt_token_ids

    assert ids("abcdef", 4) == list(b"abcd")
    assert ids("abc", 4) == list(b"abc")
    assert ids([7, 8, 9], 2) == [7, 8]
    assert ids("x" * 1000, -1) == list(b"x" * LENGTH)
    for count in (-2, LENGTH + 1, 0):
        with pytest.raises(RequestError, match=f"^truncate_prompt_tokens must be .* got {count}$"):
            ids("abc", count)


def test_matryoshka_models_give_the_first_numbers_with_length_1(model, oracle):
    options = {"hf_overrides": {"matryoshka_dimensions": [16, 32]}}
    llm = LLM(str(model), dtype="float32", device="cpu", max_model_len=LENGTH, **options)
    right = unit(oracle.pooled(b"abc")[:32])
    found = llm.embed("abc", pooling_params=PoolingParams(dimensions=32))[0].outputs.embedding
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-5)
    raw = llm.embed("abc", pooling_params=PoolingParams(dimensions=16, use_activation=False))
    np.testing.assert_allclose(raw[0].outputs.embedding, oracle.pooled(b"abc")[:16], rtol=0, atol=1e-4)
    with pytest.raises(RequestError, match="must be 16, 32"):
        llm.embed("abc", pooling_params=PoolingParams(dimensions=31))


def test_hidden_states_that_are_not_finite_are_an_error(model):
    llm = LLM(str(model), dtype="float32", device="cpu", max_model_len=LENGTH)
    runner = llm.llm_engine._core._executor._worker._runner
    hidden = runner._hidden
    runner._hidden = lambda *args: hidden(*args) * float("nan")
    with pytest.raises(RequestError, match="hidden states are NaN"):
        llm.embed("abc")
    runner._hidden = hidden
    assert np.isfinite(llm.embed("abc")[0].outputs.embedding).all()
    assert nothing_left(llm)
