"""What a caller sees of a request does not depend on drafts, wherever its end lies among accepted ones."""

import string

import pytest
from safetensors.numpy import load_file, save_file

import successor_model
from enginecore import LLM, SamplingParams
from enginecore.sampling_params import RequestOutputKind

ALPHABET = string.ascii_lowercase
PROMPT = 3 * ALPHABET
DRAFTS = {"method": "ngram", "num_speculative_tokens": 5}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that goes on with the alphabet, and begins again after z."""
    path = successor_model.write(tmp_path_factory.mktemp("alphabet") / "model")
    weights = load_file(path / "model.safetensors")
    head = weights["lm_head.weight"]
    for letter, following in zip(ALPHABET, ALPHABET[1:] + ALPHABET[0], strict=True):
        head[:, ord(letter)] = 0.0
        head[ord(following), ord(letter)] = 1.0
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def plain(model):
    return LLM(str(model), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def drafting(model):
    return LLM(str(model), dtype="float32", device="cpu", speculative_config=DRAFTS)


ENDS = {
    **{f"max_tokens {count}": {"max_tokens": count} for count in (*range(1, 15), 40)},
    **{f"stop {stop}": {"stop": [stop]} for stop in ("c", "f", "hij", "mn", "zab")},
    "the stop that ends earlier": {"stop": ["xyz", "klm"]},
    "stop in the text": {"stop": ["hij"], "include_stop_str_in_output": True},
    "stop id": {"stop_token_ids": [ord("g"), ord("t")]},
    "min_tokens before a stop id": {"stop_token_ids": [ord("c")], "min_tokens": 9},
    "min_tokens before a stop": {"stop": ["c"], "min_tokens": 9},
    "stop beyond max_tokens": {"stop": ["z"], "max_tokens": 12},
    "two samples": {"n": 2, "stop": ["mno"], "temperature": 0.5, "seed": 3},
}


def whole(llm, params):
    [output] = llm.generate([PROMPT], params, use_tqdm=False)
    return output.outputs


def streamed(llm, params):
    """Return what the deltas of each sample add up to: text, ids, log probabilities, reasons of its end."""
    engine = llm.llm_engine
    engine.add_request("r", PROMPT, params)
    samples = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            for delta in output.outputs:
                text, ids, logprobs, *_ = samples.get(delta.index, ("", [], []))
                samples[delta.index] = (
                    text + delta.text,
                    ids + delta.token_ids,
                    logprobs + delta.logprobs,
                    delta.finish_reason,
                    delta.stop_reason,
                )
    return samples


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_the_end_is_where_it_is_without_drafts(plain, drafting, end):
    settings = {"temperature": 0, "max_tokens": 60, "logprobs": 1, **end}
    params = SamplingParams(**settings)
    expected = whole(plain, params)
    assert whole(drafting, params) == expected
    deltas = SamplingParams(**settings, output_kind=RequestOutputKind.DELTA)
    found = streamed(drafting, deltas)
    assert found == streamed(plain, deltas)
    assert found == {
        sample.index: (
            sample.text,
            sample.token_ids,
            sample.logprobs,
            sample.finish_reason,
            sample.stop_reason,
        )
        for sample in expected
    }


def test_every_draft_of_an_alphabet_is_right(drafting):
    [sample] = whole(drafting, SamplingParams(temperature=0, max_tokens=60))
    assert sample.text == (3 * ALPHABET)[:60]


def test_drafts_are_counted_for_the_request_and_for_the_engine(drafting, plain):
    before = {metric.name: metric for metric in drafting.get_metrics()}
    params = SamplingParams(temperature=0, max_tokens=27)
    [output] = drafting.generate([PROMPT], params, use_tqdm=False)
    # The first token comes from the prompt. Of the other 26, steps with 5 drafts make 24, and the last has 1.
    assert (output.metrics.num_draft_tokens, output.metrics.num_accepted_tokens) == (21, 21)
    after = {metric.name: metric for metric in drafting.get_metrics()}
    counted = {
        name: after[f"octavo_spec_decode_{name}_total"].value
        - before[f"octavo_spec_decode_{name}_total"].value
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    }
    assert counted == {"num_drafts": 5, "num_draft_tokens": 21, "num_accepted_tokens": 21}
    [output] = plain.generate([PROMPT], params, use_tqdm=False)
    assert (output.metrics.num_draft_tokens, output.metrics.num_accepted_tokens) == (0, 0)
