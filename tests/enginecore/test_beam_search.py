"""`LLM.beam_search`, against a slow search over transformers' logits and against transformers' own."""

import math

import pytest
import torch

import byte_tokenizer
from checkpoints import Oracle, llama_config, save_random
from enginecore import LLM, BeamSearchParams, SamplingParams
from enginecore.errors import RequestError

PROMPTS = [list(b"abc"), list(b"a longer prompt"), [7]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_random(llama_config(), tmp_path_factory.mktemp("m-beams"))
    byte_tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def oracle(model):
    return Oracle(model)


@pytest.fixture(scope="module")
def llm(model):
    return LLM(str(model), dtype="float32", device="cpu", max_model_len=64)


def slow_search(oracle, prompt, *, width, rounds, eos=None, penalty=1.0):
    """Return (tokens, log probability) of the best beams, by the definition, a model call for each beam."""
    beams, done = [(prompt, 0.0)], []
    for _ in range(rounds):
        grown = []
        for tokens, total in beams:
            logprobs = oracle.logits(tokens)[-1].double().log_softmax(-1)
            for token in logprobs.topk(2 * width).indices.tolist():
                entry = ([*tokens, token], total + logprobs[token].item())
                (done if token == eos else grown).append(entry)
        beams = sorted(grown, key=lambda beam: -beam[1])[:width]
    done += beams

    def score(beam):
        tokens, total = beam
        return total / (len(tokens) - (tokens[-1] == eos)) ** penalty

    return sorted(done, key=score, reverse=True)[:width]


def near_eos(oracle, prompt, rounds):
    """Return a token that some beams choose and none always: it serves as EOS."""
    found = slow_search(oracle, prompt, width=3, rounds=rounds)
    return found[0][0][len(prompt) + 1]


@pytest.mark.parametrize("width", [1, 3, 5])
def test_beams_are_those_of_a_slow_search(llm, oracle, width):
    params = BeamSearchParams(beam_width=width, max_tokens=6, ignore_eos=True)
    outputs = llm.beam_search(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = slow_search(oracle, prompt, width=width, rounds=6)
        assert [beam.tokens for beam in output.sequences] == [tokens for tokens, _ in expected]
        for beam, (_, total) in zip(output.sequences, expected, strict=True):
            assert beam.cum_logprob == pytest.approx(total, abs=1e-3)
            assert (beam.finish_reason, beam.stop_reason) == ("length", None)
            assert beam.text == llm.get_tokenizer().decode(beam.tokens)
            chosen = zip(beam.logprobs, beam.tokens[len(prompt) :], strict=True)
            assert sum(row[token].logprob for row, token in chosen) == pytest.approx(beam.cum_logprob)
            assert all(len(row) == min(2 * width, 320) for row in beam.logprobs)


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 3.0])
def test_beams_that_end(model, oracle, penalty):
    prompt = PROMPTS[0]
    eos = near_eos(oracle, prompt, 5)
    ending = LLM(
        str(model), dtype="float32", device="cpu", max_model_len=64, hf_overrides={"eos_token_id": eos}
    )
    settings = {"beam_width": 3, "max_tokens": 5, "length_penalty": penalty}
    expected = slow_search(oracle, prompt, width=3, rounds=5, eos=eos, penalty=penalty)
    assert any(tokens[-1] == eos for tokens, _ in expected) == (penalty < 3)
    for shown in (True, False):
        params = BeamSearchParams(**settings, include_stop_str_in_output=shown)
        (output,) = ending.beam_search(prompt, params)
        assert len(output.sequences) == 3
        for beam, (tokens, total) in zip(output.sequences, expected, strict=True):
            ended = tokens[-1] == eos
            assert beam.tokens == (tokens[:-1] if ended and not shown else tokens)
            assert beam.cum_logprob == pytest.approx(total, abs=1e-3)
            assert (beam.finish_reason, beam.stop_reason) == (("stop", eos) if ended else ("length", None))
            assert len(beam.logprobs) == len(tokens) - len(prompt)
    (output,) = ending.beam_search(prompt, BeamSearchParams(**settings, ignore_eos=True))
    assert {beam.finish_reason for beam in output.sequences} == {"length"}
    ending.shutdown()


@pytest.mark.parametrize("width", [2, 4])
def test_beams_are_transformers_s_where_nothing_ends_them(llm, oracle, width):
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        expected = oracle.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=7,
            min_new_tokens=7,
            eos_token_id=None,
            pad_token_id=0,
            length_penalty=0.0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        params = BeamSearchParams(width, 7, ignore_eos=True, length_penalty=0.0)
        (output,) = llm.beam_search(prompt, params)
        assert [beam.tokens for beam in output.sequences] == expected.sequences.tolist()
        scores = [beam.cum_logprob for beam in output.sequences]
        assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-3)


def test_one_beam_is_the_greedy_answer(llm):
    greedy = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    beams = llm.beam_search(PROMPTS, BeamSearchParams(1, 8, ignore_eos=True), concurrency_limit=2)
    for prompt, answer, output in zip(PROMPTS, greedy, beams, strict=True):
        assert output.sequences[0].tokens == prompt + answer.outputs[0].token_ids


def test_a_temperature_offers_a_drawn_token_too(llm):
    """At a temperature at which all tokens are as likely, it is hardly ever one of the two best."""
    (output,) = llm.beam_search("abc", BeamSearchParams(1, 5, ignore_eos=True, temperature=1e4))
    assert {len(row) for row in output.sequences[0].logprobs} == {3}
    assert math.isfinite(output.sequences[0].cum_logprob)


def test_beams_end_at_the_length_limit_and_share_cached_blocks(llm):
    llm.reset_prefix_cache()
    before = llm.llm_engine.stats()
    (output,) = llm.beam_search([3] * 60, BeamSearchParams(2, 50, ignore_eos=True))
    assert [len(beam.tokens) for beam in output.sequences] == [64, 64]
    after = llm.llm_engine.stats()
    # The first round finds nothing cached; in the three after it two beams find three blocks of 16 each.
    assert after.prefix_hits - before.prefix_hits == 3 * 2 * 48
    assert (after.running, after.waiting, after.kv_cache_usage) == (0, 0, 0)


def test_metrics_count_a_search_as_one_request(model):
    llm = LLM(str(model), dtype="float32", device="cpu", max_model_len=64)
    llm.beam_search(PROMPTS[:2], BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True))
    found = {(value.name, value.labels.get("finished_reason")): value for value in llm.get_metrics()}
    prompts = sum(len(prompt) for prompt in PROMPTS[:2])
    assert found["octavo_request_success_total", "length"].value == 2
    assert found["octavo_prompt_tokens_total", None].value == prompts
    assert found["octavo_generation_tokens_total", None].value == 2 * 3 * 4
    for name, count, total in (
        ("request_prompt_tokens", 2, prompts),
        ("request_generation_tokens", 2, 2 * 3 * 4),
        ("request_params_n", 2, 2 * 3),
        ("request_params_max_tokens", 2, 2 * 4),
    ):
        histogram = found[f"octavo_{name}", None]
        assert (histogram.count, histogram.sum) == (count, total), name
    for name, count in (
        ("time_to_first_token", 2),
        ("inter_token_latency", 2 * 3),
        ("e2e_request_latency", 2),
        ("request_queue_time", 2),
        ("request_prefill_time", 2),
    ):
        assert found[f"octavo_{name}_seconds", None].count == count, name


def test_a_search_that_is_refused_is_not_counted_and_one_that_fails_is_an_error(model):
    llm = LLM(str(model), dtype="float32", device="cpu", max_model_len=64)

    def ends():
        values = (value for value in llm.get_metrics() if value.name == "octavo_request_success_total")
        return {value.labels["finished_reason"]: value.value for value in values if value.value}

    with pytest.raises(RequestError):
        llm.beam_search([[1], [320]], BeamSearchParams(beam_width=2, max_tokens=4))
    assert ends() == {}
    steps, step = [], llm.llm_engine.step

    def dies():
        steps.append(None)
        if len(steps) == 3:
            raise RuntimeError("the third step fails")
        return step()

    llm.llm_engine.step = dies
    with pytest.raises(RuntimeError):
        llm.beam_search([[1], [2]], BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True))
    assert ends() == {"error": 2}


def test_a_search_without_prompts(llm):
    assert llm.beam_search([], BeamSearchParams(2, 2)) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 0}, "beam_width must be between 1 and 128, got 0"),
        ({"beam_width": 129}, "beam_width must be between 1 and 128"),
        ({"beam_width": 2.0}, "beam_width must be an integer"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": True}, "max_tokens must be an integer"),
        ({"temperature": -1}, "temperature must be finite"),
        ({"length_penalty": float("nan")}, "length_penalty must be a number"),
        ({"length_penalty": "1"}, "length_penalty must be a number"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
    ],
)
def test_parameters_that_are_wrong(fields, message):
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 2} | fields)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (
            "abc",
            BeamSearchParams(11, 2),
            "beam_width=11 needs 22 log probabilities a token, and max_logprobs is 20",
        ),
        ("a" * 64, BeamSearchParams(2, 2), "its 64 tokens leave no room"),
        ("abc", SamplingParams(), "params must be BeamSearchParams"),
        ([[1], [400]], BeamSearchParams(2, 2), "prompt 1: the prompt holds token id 400"),
    ],
)
def test_searches_that_cannot_be_run(llm, prompts, params, message):
    with pytest.raises(RequestError, match=message):
        llm.beam_search(prompts, params)
    stats = llm.llm_engine.stats()
    assert (stats.running, stats.waiting, stats.kv_cache_usage) == (0, 0, 0)
