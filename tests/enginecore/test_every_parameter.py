"""Every field of SamplingParams through an engine, each against its definition over transformers' logits."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import byte_tokenizer
from byte_tokenizer import EOS
from checkpoints import Oracle, llama_config, save_random
from enginecore import LLM, LLMEngine, RequestOutputKind, SamplingParams
from enginecore.config import make_config

PROMPT = list(b"abcab")
COUNT = 6
VOCAB = 320
OPTIONS = {"dtype": "float32", "device": "cpu", "max_model_len": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_random(llama_config(), tmp_path_factory.mktemp("m-fields"))
    byte_tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def oracle(model):
    return Oracle(model)


@pytest.fixture(scope="module")
def llm(model):
    return LLM(str(model), **OPTIONS, max_logprobs=-1)


def logits_after(oracle, tokens) -> np.ndarray:
    return oracle.logits(tokens)[-1].double().numpy()


Change = Callable[[np.ndarray, list[int]], np.ndarray]
"""(logits, generated) to logits."""


def greedy(oracle, change: Change, count=COUNT, prompt=PROMPT) -> list[int]:
    generated: list[int] = []
    for _ in range(count):
        generated.append(int(change(logits_after(oracle, [*prompt, *generated]), generated).argmax()))
    return generated


def repetition(logits, generated):
    seen = sorted({*PROMPT, *generated})
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.8, logits[seen] * 1.8)
    return logits


def presence(logits, generated):
    logits[sorted(set(generated))] -= 2.0
    return logits


def frequency(logits, generated):
    np.subtract.at(logits, generated, 1.5)
    return logits


def bias(logits, generated):
    logits[7] += 3.0
    logits[int(np.argsort(logits)[-1])] -= 0.0
    return logits


def allowed(logits, generated):
    kept = np.full_like(logits, -np.inf)
    kept[[1, 2, 300]] = logits[[1, 2, 300]]
    return kept


class Greedy(NamedTuple):
    """Parameters with which the best token changes, and how."""

    fields: dict[str, Any]
    change: Change


GREEDY = {
    "temperature": Greedy({}, lambda logits, _: logits),
    "repetition_penalty": Greedy({"repetition_penalty": 1.8}, repetition),
    "presence_penalty": Greedy({"presence_penalty": 2.0}, presence),
    "frequency_penalty": Greedy({"frequency_penalty": 1.5}, frequency),
    "logit_bias": Greedy({"logit_bias": {7: 3.0}}, bias),
    "allowed_token_ids": Greedy({"allowed_token_ids": [1, 2, 300]}, allowed),
}


@pytest.mark.parametrize("name", GREEDY)
def test_the_best_token(llm, oracle, name):
    fields, change = GREEDY[name]
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, **fields)
    (output,) = llm.generate([PROMPT], params)
    assert output.outputs[0].token_ids == greedy(oracle, change)


def kept(probs: np.ndarray, *, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """What may be drawn, by each definition."""
    order = np.argsort(-probs)
    if top_k:
        return order[:top_k]
    if min_p:
        return np.flatnonzero(probs >= min_p * probs.max())
    before = np.cumsum(probs[order]) - probs[order]
    return order[before < top_p]


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [
        ({}, 1.0),
        ({}, 0.3),
        ({}, 4.0),
        ({"top_k": 4}, 1.0),
        ({"top_p": 0.4}, 1.0),
        ({"min_p": 0.2}, 1.0),
    ],
    ids=str,
)
def test_what_is_drawn(llm, oracle, fields, temperature):
    draws = 400
    params = SamplingParams(
        n=draws, seed=11, temperature=temperature, max_tokens=1, ignore_eos=True, **fields
    )
    (output,) = llm.generate([PROMPT], params)
    counts = np.bincount([sample.token_ids[0] for sample in output.outputs], minlength=VOCAB)
    scaled = logits_after(oracle, PROMPT) / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    may = kept(probs, **fields)
    assert counts.sum() == counts[may].sum() == draws
    expected = np.zeros(VOCAB)
    expected[may] = probs[may] / probs[may].sum() * draws
    # The likeliest dozen by themselves and the rest as one; Pearson's statistic has mean 12, deviation 5.
    best = np.argsort(-expected)[:12]
    seen = np.append(counts[best], draws - counts[best].sum())
    wanted = np.append(expected[best], draws - expected[best].sum())
    used = wanted > 1e-9
    assert ((seen[used] - wanted[used]) ** 2 / wanted[used]).sum() < 45


def run(llm, prompt="abcab", **fields):
    (output,) = llm.generate(prompt, SamplingParams(**{"temperature": 0, "max_tokens": COUNT} | fields))
    return output


def script(*tokens: int):
    """A callable that makes the engine say these tokens."""

    def say(generated, logits):
        logits[tokens[min(len(generated), len(tokens) - 1)]] = 1e6
        return logits

    return [say]


HELLO = script(*b"hello world", EOS)


def test_n(llm):
    output = run(llm, n=3, temperature=1.0, seed=1)
    assert [sample.index for sample in output.outputs] == [0, 1, 2]


def test_seed(llm):
    first, again, other = (run(llm, temperature=1.0, seed=seed).outputs[0].token_ids for seed in (4, 4, 5))
    assert first == again != other


def test_stop_and_include_stop_str_in_output(llm):
    for included, text in ((False, "he"), (True, "hello ")):
        sample = run(
            llm, logits_processors=HELLO, max_tokens=20, stop=["llo "], include_stop_str_in_output=included
        ).outputs[0]
        assert (sample.text, sample.stop_reason, len(sample.token_ids)) == (text, "llo ", 6)


def test_stop_token_ids_and_ignore_eos(llm):
    sample = run(llm, logits_processors=HELLO, max_tokens=20, stop_token_ids=[ord("o")]).outputs[0]
    assert (sample.text, sample.stop_reason) == ("hell", ord("o"))
    for ignored, count, reason in ((False, 12, "stop"), (True, 20, "length")):
        sample = run(llm, logits_processors=HELLO, max_tokens=20, ignore_eos=ignored).outputs[0]
        assert (len(sample.token_ids), sample.finish_reason) == (count, reason)


def test_max_tokens_and_min_tokens(llm):
    assert len(run(llm, logits_processors=HELLO, max_tokens=3).outputs[0].token_ids) == 3
    ended = script(EOS)
    assert run(llm, logits_processors=ended).outputs[0].token_ids == [EOS]
    # Unlike a processor, a bias of 100 is no match for the rule.
    sample = run(llm, logit_bias={EOS: 100}, min_tokens=4).outputs[0]
    assert EOS not in sample.token_ids[:4]
    assert sample.token_ids[4:] == [EOS]


def test_bad_words(llm, oracle):
    letters = [*b"abcdefghijklmnopqrstuvwxyz"]

    def of_letters(logits, _):
        kept = np.full_like(logits, -np.inf)
        kept[letters] = logits[letters]
        return kept

    best = greedy(oracle, of_letters, 2)

    def without(logits, generated):
        logits = of_letters(logits, generated)
        if generated and generated[-1] == best[0]:
            logits[best[1]] = -np.inf
        return logits

    expected = greedy(oracle, without)
    assert expected[0] == best[0]
    found = run(llm, bad_words=[bytes(best).decode()], allowed_token_ids=letters)
    assert found.outputs[0].token_ids == expected


def test_logprobs_and_prompt_logprobs(llm, oracle):
    output = run(llm, logprobs=2, prompt_logprobs=-1, ignore_eos=True)
    tokens = [*PROMPT, *output.outputs[0].token_ids]
    expected = oracle.logits(tokens).double().log_softmax(-1).numpy()
    assert output.prompt_logprobs[0] is None
    for position, row in enumerate(output.prompt_logprobs[1:]):
        assert len(row) == VOCAB
        np.testing.assert_allclose(
            [row[token].logprob for token in range(VOCAB)], expected[position], atol=1e-3
        )
    for position, row in enumerate(output.outputs[0].logprobs, len(PROMPT) - 1):
        assert [*row] == np.argsort(-expected[position])[:2].tolist()


def test_logprob_token_ids(llm, oracle):
    (row, *_) = run(llm, logprob_token_ids=[9]).outputs[0].logprobs
    logits = logits_after(oracle, PROMPT)
    assert row[9].logprob == pytest.approx(logits[9] - np.log(np.exp(logits).sum()), abs=1e-3)


def test_detokenize_and_special_tokens(llm):
    assert run(llm, logits_processors=HELLO, max_tokens=5, detokenize=False).outputs[0].text == ""
    marked = script(*b"a", EOS, *b"b")
    for skip, text in ((True, "ab"), (False, "a<eos>b")):
        fields = {"logits_processors": marked, "max_tokens": 3, "ignore_eos": True}
        assert run(llm, **fields, skip_special_tokens=skip).outputs[0].text == text
    with pytest.raises(ValueError, match="spaces_between_special_tokens=False is not supported"):
        SamplingParams(spaces_between_special_tokens=False)


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (RequestOutputKind.CUMULATIVE, ["h", "he", "hel"]),
        (RequestOutputKind.DELTA, ["h", "e", "l"]),
        (RequestOutputKind.FINAL_ONLY, ["hel"]),
    ],
)
def test_output_kind(llm, kind, texts):
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=3, logits_processors=HELLO, output_kind=kind)
    engine.add_request(f"kind {kind}", "a", params)
    found = []
    while engine.has_unfinished_requests():
        found += [output.outputs[0].text for output in engine.step()]
    assert found == texts


def test_skip_reading_prefix_cache(llm):
    prompt = [5] * 40
    for skip, cached in ((None, 0), (None, 32), (True, 0), (False, 32)):
        fields = {"temperature": 0, "max_tokens": 1, "skip_reading_prefix_cache": skip}
        (output,) = llm.generate([prompt], SamplingParams(**fields))
        assert output.num_cached_tokens == cached


def test_equal_samples(llm):
    samples = run(llm, n=2, equal_samples=True).outputs
    assert samples[0].token_ids == samples[1].token_ids


TESTS = {
    "n": test_n,
    **dict.fromkeys(GREEDY, test_the_best_token),
    **dict.fromkeys(("top_p", "top_k", "min_p"), test_what_is_drawn),
    "seed": test_seed,
    **dict.fromkeys(("stop", "include_stop_str_in_output"), test_stop_and_include_stop_str_in_output),
    **dict.fromkeys(("stop_token_ids", "ignore_eos"), test_stop_token_ids_and_ignore_eos),
    **dict.fromkeys(("max_tokens", "min_tokens"), test_max_tokens_and_min_tokens),
    "bad_words": test_bad_words,
    **dict.fromkeys(("logprobs", "prompt_logprobs"), test_logprobs_and_prompt_logprobs),
    "logprob_token_ids": test_logprob_token_ids,
    **dict.fromkeys(
        ("detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
        test_detokenize_and_special_tokens,
    ),
    "output_kind": test_output_kind,
    "skip_reading_prefix_cache": test_skip_reading_prefix_cache,
    "equal_samples": test_equal_samples,
    "structured_outputs": "test_sampling_params",
    "extra_args": "test_logits_processors",
    "logits_processors": "test_logits_processors",
}
"""Where each field is tested: here, or in another file."""


def test_each_field_has_a_test():
    assert TESTS.keys() == {*SamplingParams.__struct_fields__}


def halve(generated, logits):
    return logits / 2


def forbid_last(generated, logits):
    """No token twice in a row."""
    if generated:
        logits[generated[-1]] = -np.inf
    return logits


@st.composite
def requests(draw):
    """A prompt and parameters, of which some make the row change its logits, some report, some draw."""
    fields: dict[str, Any] = {
        "temperature": draw(st.sampled_from([0.0, 0.0, 0.8, 1.5])),
        "seed": draw(st.integers(0, 1000)),
        "max_tokens": draw(st.integers(1, 12)),
        "ignore_eos": True,
    }
    for name, values in {
        "top_p": [0.5, 0.9],
        "top_k": [1, 20],
        "min_p": [0.05],
        "repetition_penalty": [0.7, 1.4],
        "presence_penalty": [-1.0, 1.0],
        "frequency_penalty": [0.5],
        "logit_bias": [{3: 2.0, 9: -4.0}],
        "allowed_token_ids": [list(range(60))],
        "bad_words": [["a", "bc"]],
        "min_tokens": [1],
        "logprobs": [0, 3],
        "logprob_token_ids": [[4, 5]],
        "prompt_logprobs": [1],
        "structured_outputs": [
            {"regex": "[abc]{2,20}"},
            {"choice": ["abcab", "abd", "b"]},
            {"json_object": True},
        ],
        "logits_processors": [[halve], [forbid_last]],
    }.items():
        if draw(st.integers(0, 4)) == 0 and not (name == "logprob_token_ids" and "logprobs" in fields):
            fields[name] = draw(st.sampled_from(values))
    prompt = draw(st.lists(st.sampled_from([*b"abcd"]), min_size=1, max_size=30))
    return prompt, SamplingParams(**fields)


@pytest.fixture(scope="module")
def alone(model):
    """One request at a time, nothing cached."""
    return LLM(str(model), **OPTIONS, max_num_seqs=1, enable_prefix_caching=False)


CROWDED: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 7, "block_size": 8},
    "preemptions": {"num_blocks_override": 16, "block_size": 4},
    "drafts": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 2,
        }
    },
}
"""Prompts cut into chunks of 7 tokens at most; a cache that three rows fill; drafts by prompt lookup."""


@pytest.fixture(scope="module", params=CROWDED)
def crowded(request, model):
    return LLM(str(model), **OPTIONS, max_num_seqs=4, **CROWDED[request.param])


@settings(deadline=None, max_examples=15, derandomize=True)
@given(st.lists(requests(), min_size=2, max_size=6))
def test_a_row_by_itself_is_the_row_in_a_batch(alone, crowded, batch):
    prompts, params = [prompt for prompt, _ in batch], [wanted for _, wanted in batch]
    together = crowded.generate(prompts, params)
    for prompt, wanted, found in zip(prompts, params, together, strict=True):
        (expected,) = alone.generate([prompt], wanted)
        mine, theirs = found.outputs[0], expected.outputs[0]
        assert (mine.token_ids, mine.finish_reason) == (theirs.token_ids, theirs.finish_reason)
        for row, other in zip(mine.logprobs or [], theirs.logprobs or [], strict=True):
            assert [entry.logprob for entry in row.values()] == pytest.approx(
                [entry.logprob for entry in other.values()], abs=1e-3
            )
        for row, other in zip(
            (found.prompt_logprobs or [])[1:], (expected.prompt_logprobs or [])[1:], strict=True
        ):
            assert row.keys() == other.keys()


def test_the_small_cache_preempts(crowded, request):
    """Otherwise the batches above show nothing."""
    if "preemptions" in request.node.name:
        crowded.generate(
            [list(b"abcd") * 7] * 4, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        )
        assert crowded.llm_engine.stats().preemptions > 0
    if "drafts" in request.node.name:
        ever = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias={100: 100.0})
        crowded.generate([list(b"abcd")], ever)
        assert crowded.llm_engine.stats().num_accepted_tokens > 0


def test_an_engine_that_is_stepped_by_hand_takes_callables_too(model):
    engine = LLMEngine(make_config({"model": str(model), **OPTIONS}))
    engine.add_request(
        "1", "a", SamplingParams(temperature=0, max_tokens=2, logits_processors=script(*b"ok"))
    )
    found = []
    while engine.has_unfinished_requests():
        found += engine.step()
    assert found[-1].outputs[0].text == "ok"
