"""`LLM` and `LLMEngine`: text in, text out, in the caller's own process."""

import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import byte_tokenizer
from byte_tokenizer import EOS
from checkpoints import Oracle, llama_config, save_random
from enginecore import LLM, LLMEngine, RequestOutputKind, SamplingParams
from enginecore.config import make_config
from enginecore.errors import ConfigError, EngineDeadError, RequestError
from enginecore.worker.models.decoder import Decoder

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_random(llama_config(), tmp_path_factory.mktemp("m-rand"))
    byte_tokenizer.save(
        path, chat_template="{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"
    )
    return path


@pytest.fixture(scope="module")
def llm(model):
    return LLM(str(model), dtype="float32", device="cpu", max_model_len=64)


def nothing_left(llm):
    stats = llm.llm_engine.stats()
    llm.llm_engine._core.check()
    return (stats.running, stats.waiting, stats.kv_cache_usage) == (0, 0, 0)


def test_every_form_of_prompt(model, llm):
    expected = Oracle(model).greedy(list(b"abc"), 12)[0]
    params = SamplingParams(**GREEDY)
    single = [
        llm.generate("abc", params),
        llm.generate({"prompt": "abc"}, params),
        llm.generate({"prompt_token_ids": [97, 98, 99]}, params),
        llm.generate([97, 98, 99], params),
        llm.generate([[97, 98, 99]], params),
        llm.chat([{"role": "a", "content": "b"}], params),
    ]
    for outputs in single[:-1]:
        assert [o.outputs[0].token_ids for o in outputs] == [expected]
        assert outputs[0].prompt_token_ids == [97, 98, 99]
    assert single[-1][0].prompt == "a:b;"
    many = llm.generate(["abc", {"prompt_token_ids": [97, 98, 99]}, "x"], [params, params, params])
    assert [len(o.outputs[0].token_ids) for o in many] == [12, 12, 12]
    assert many[0].outputs[0].text == many[1].outputs[0].text
    assert nothing_left(llm)


def test_two_conversations(llm):
    turns = [{"role": "user", "content": "hi"}]
    outputs = llm.chat([turns, [*turns, {"role": "bot", "content": "ho"}]], SamplingParams(**GREEDY))
    assert [o.prompt for o in outputs] == ["user:hi;", "user:hi;bot:ho;"]


def test_a_refused_prompt_stops_the_whole_batch_and_leaves_nothing(llm):
    with pytest.raises(ValueError, match=r"64 tokens.*70 tokens"):
        llm.generate(["ab", "x" * 70, "cd"], SamplingParams(**GREEDY))
    assert nothing_left(llm)
    with pytest.raises(RequestError, match="3 prompts but 2 sampling parameters"):
        llm.generate(["a", "b", "c"], [SamplingParams(), SamplingParams()])
    assert len(llm.generate("ab", SamplingParams(**GREEDY))) == 1


@pytest.mark.parametrize(
    ("length", "max_tokens", "generated"), [(63, None, 1), (63, 1, 1), (62, 2, 2), (62, None, 2)]
)
def test_up_to_the_length_limit(llm, length, max_tokens, generated):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    output = llm.generate("x" * length, params)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (generated, "length")


@pytest.mark.parametrize(
    ("length", "max_tokens", "min_tokens"), [(63, 2, 0), (62, 100, 0), (60, 100, 100), (1, 10**9, 0)]
)
def test_max_tokens_beyond_the_room_end_at_the_length_limit(llm, length, max_tokens, min_tokens):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, min_tokens=min_tokens, ignore_eos=True)
    output = llm.generate("x" * length, params)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (64 - length, "length")


@pytest.mark.parametrize(("length", "max_tokens"), [(64, None), (64, 1), (65, 1)])
def test_a_prompt_that_leaves_no_room(llm, length, max_tokens):
    with pytest.raises(ValueError, match=f"{length} tokens.*64|64.*{length}"):
        llm.generate(["ab", "x" * length], SamplingParams(temperature=0, max_tokens=max_tokens))
    assert nothing_left(llm)


def test_samples_of_one_prompt(llm):
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    first, again = llm.generate("abc", params)[0], llm.generate("abc", params)[0]
    assert [o.index for o in first.outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in first.outputs}) == 3
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in again.outputs]
    alone = llm.generate("abc", SamplingParams(temperature=1.0, seed=6, max_tokens=8, ignore_eos=True))[0]
    assert alone.outputs[0].token_ids == first.outputs[1].token_ids


def test_unseeded_requests_differ_and_a_fresh_engine_repeats_them(model):
    def draws():
        llm = LLM(str(model), dtype="float32", device="cpu", seed=3)
        params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
        return [o.outputs[0].token_ids for o in llm.generate(["abc"] * 3, params)]

    first = draws()
    assert len(set(map(tuple, first))) == 3
    assert draws() == first


def test_logprobs_add_up(llm):
    params = SamplingParams(**GREEDY, logprobs=2, prompt_logprobs=1)
    output = llm.generate("abcd", params)[0]
    sample = output.outputs[0]
    chosen = [entry[token].logprob for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)]
    assert sample.cumulative_logprob == pytest.approx(sum(chosen))
    assert all(entry[token].rank == 1 for entry, token in zip(sample.logprobs, sample.token_ids, strict=True))
    assert output.prompt_logprobs[0] is None
    for entry, token in zip(output.prompt_logprobs[1:], b"bcd", strict=True):
        assert token in entry


def test_prompt_logprobs_are_computed_in_pieces_of_max_num_seqs(model, monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)
    prompt = {"prompt_token_ids": [index * 7 % 256 for index in range(50)]}
    rows = []
    logits = Decoder.logits

    def counted(self, hidden):
        rows.append(len(hidden))
        return logits(self, hidden)

    found = []
    for most in (8, 64):
        llm = LLM(str(model), dtype="float32", device="cpu", max_model_len=64, max_num_seqs=most)
        with monkeypatch.context() as patched:
            patched.setattr(Decoder, "logits", counted)
            found.append(llm.generate(prompt, params)[0].prompt_logprobs)
    assert rows == [8] * 6 + [1] + [1] + [49] + [1]
    assert len(found[0]) == 50
    oracle = Oracle(model).logits(prompt["prompt_token_ids"]).log_softmax(-1)
    for pieces, whole, expected in zip(found[0][1:], found[1][1:], oracle, strict=False):
        assert list(pieces) == list(whole)
        assert [entry.rank for entry in pieces.values()] == [entry.rank for entry in whole.values()]
        for token, entry in pieces.items():
            assert entry.logprob == pytest.approx(expected[token].item(), abs=1e-3)


def test_prompt_logprobs_of_several_requests_in_a_step(llm):
    def params(width):
        return SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=width)

    prompts, widths = ["abcdefgh", "xyz", "hello", "q", "hello there"], [2, None, 0, 1, 2]
    together = llm.generate(prompts, [params(width) for width in widths])
    for prompt, width, output in zip(prompts, widths, together, strict=True):
        alone = llm.generate(prompt, params(width))[0].prompt_logprobs
        assert (output.prompt_logprobs is None) == (width is None)
        for entry, expected in zip((output.prompt_logprobs or [])[1:], (alone or [])[1:], strict=True):
            assert list(entry) == list(expected)
            for token, found in entry.items():
                assert found.rank == expected[token].rank
                assert found.logprob == pytest.approx(expected[token].logprob, abs=1e-4)


def test_the_engine_steps(model):
    engine = LLMEngine(make_config({"model": str(model), "dtype": "float32", "device": "cpu"}))
    params = SamplingParams(**GREEDY, output_kind=RequestOutputKind.DELTA)
    engine.add_request("one", "abc", params)
    engine.add_request("two", "xyz", params)
    engine.add_request("three", "gone", params)
    with pytest.raises(RequestError, match="'one' belongs to an unfinished request"):
        engine.add_request("one", "abc", params)
    engine.abort_request("three")
    tokens = {"one": [], "two": []}
    steps = 0
    while engine.has_unfinished_requests():
        steps += 1
        for output in engine.step():
            tokens[output.request_id] += output.outputs[0].token_ids
    assert steps == 12
    assert tokens["one"] == Oracle(model).greedy(list(b"abc"), 12)[0]
    assert len(tokens["two"]) == 12


def test_eos_ends_a_request(model, llm):
    free = llm.generate("abc", SamplingParams(temperature=0, max_tokens=12, logit_bias={EOS: 100}))[0]
    sample = free.outputs[0]
    assert (sample.text, sample.token_ids) == ("", [EOS])
    assert (sample.finish_reason, sample.stop_reason) == ("stop", None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 3}, "unknown option 'max_num_seq'"),
        ({"device": "tpu"}, "device must be auto, cpu"),
        ({"dtype": "int3"}, "dtype"),
        ({"device": "cuda:99"}, "cuda:99"),
    ],
)
def test_options_that_are_wrong(model, options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(str(model), **options)


@pytest.mark.slow
def test_two_engines_in_one_script_that_ends_by_itself(model):
    script = f"""
from enginecore import LLM, SamplingParams
for _ in range(2):
    llm = LLM({str(model)!r}, device="cpu")
    print(len(llm.generate("abc", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))))
    del llm
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "1\n1\n")


def test_any_iterable_of_prompts(llm):
    params = SamplingParams(**GREEDY)
    expected = [o.outputs[0].token_ids for o in llm.generate(["a", "b"], params)]
    for prompts in ((p for p in ["a", "b"]), map(str, ["a", "b"]), iter(["a", "b"]), ("a", "b")):
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == expected
    for ids in (np.array([97]), [np.int64(97)], torch.tensor([97])):
        assert [o.outputs[0].token_ids for o in llm.generate(ids, params)] == expected[:1]
    assert llm.generate(iter([]), params) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(None), "prompts must be a prompt or a list"),
        (lambda llm: llm.generate("a", {"temperature": 0}), "sampling_params must be SamplingParams"),
        (lambda llm: llm.generate("a", 5), "sampling_params must be SamplingParams"),
        (lambda llm: llm.chat({"role": "user", "content": "a"}), "messages must be a list"),
        (
            lambda llm: llm.generate(["a", "x" * 70, "b"]),
            "prompt 1: .* context length is 64 tokens. However, your prompt is too long: its 70",
        ),
        (
            lambda llm: llm.generate("x" * 10_000_000),
            "maximum context length is 64 tokens. However, your prompt is too long: its 10000000 characters",
        ),
    ],
)
def test_mistakes_are_named(llm, call, message):
    with pytest.raises(RequestError, match=message):
        call(llm)
    assert nothing_left(llm)


@pytest.mark.parametrize(
    "settings",
    [
        {"allowed_token_ids": [EOS], "min_tokens": 3},
        {"stop_token_ids": list(range(320)), "min_tokens": 1},
        {"allowed_token_ids": [97], "bad_words": ["a"]},
    ],
    ids=["eos only", "all stop", "bad word"],
)
def test_parameters_that_leave_no_token(llm, settings):
    with pytest.raises(RequestError, match="no token could be chosen"):
        llm.generate("abc", SamplingParams(temperature=0, max_tokens=6, **settings))


def test_penalties_beyond_float32(llm):
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, repetition_penalty=1e300)
    large = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, repetition_penalty=1e29)
    assert (
        llm.generate("abc", params)[0].outputs[0].token_ids
        == llm.generate("abc", large)[0].outputs[0].token_ids
    )


def test_a_float8_cache_stays_near_the_full_one(model):
    prompt = {"prompt_token_ids": list(range(5, 45))}
    ask = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    logprobs = {}
    for cache in ("auto", "fp8"):
        llm = LLM(
            str(model),
            dtype="float32",
            device="cpu",
            max_model_len=64,
            max_logprobs=-1,
            kv_cache_dtype=cache,
        )
        first, again = llm.generate(prompt, ask)[0], llm.generate(prompt, ask)[0]
        assert again.num_cached_tokens == 32
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        entries = first.outputs[0].logprobs[0]
        logprobs[cache] = np.array([entries[token].logprob for token in sorted(entries)])
    # Three bits after the leading one: keys and values are off by up to 1 / 16.
    difference = np.abs(logprobs["auto"] - logprobs["fp8"])
    assert 1e-4 < difference.max() < 0.1 * np.ptp(logprobs["auto"])


INTERRUPTED = """
import signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)
from enginecore import LLM, SamplingParams

llm = LLM(sys.argv[1], dtype="float32", device="cpu", max_model_len=64)
greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
expected = llm.generate("abc", greedy)[0].outputs[0].token_ids
executor = llm.llm_engine._core._executor
submit = executor.submit

def interrupted(step):
    signal.raise_signal(signal.SIGINT)
    submit(step)

executor.submit = interrupted
try:
    llm.generate(["ab", "cd"], greedy)
except KeyboardInterrupt:
    executor.submit = submit
    print(llm.generate("abc", greedy)[0].outputs[0].token_ids == expected, llm.llm_engine.stats().running)
"""


@pytest.mark.slow
def test_an_interrupted_engine_goes_on(model):
    """In a program of its own, since only a main thread is interrupted."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(model)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["True", "0"], done.stderr


INTERRUPTED_STEPS = """
import signal, sys
from enginecore import LLMEngine, SamplingParams
from enginecore.config import make_config

options = {"dtype": "float32", "device": "cpu", "max_model_len": 64}
engine = LLMEngine(make_config({"model": sys.argv[1], **options}))
collect = engine._core._executor.collect

def interrupted():
    signal.raise_signal(signal.SIGINT)
    return collect()

engine._core._executor.collect = interrupted
engine.add_request("a", "abc", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
last, interrupts = [], 0
while engine.has_unfinished_requests():
    try:
        last = engine.step() or last
    except KeyboardInterrupt:
        interrupts += 1
        if interrupts == 12:
            engine._core._executor.collect = collect
print(last[-1].outputs[0].token_ids, last[-1].finished)
"""


@pytest.mark.slow
def test_no_output_is_lost_to_ctrl_c(model):
    """Every step is interrupted, the last one too; its output is returned by the call after it."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_STEPS, str(model)], capture_output=True, text=True, timeout=120
    )
    expected = Oracle(model).greedy(list(b"abc"), 12)[0]
    assert done.stdout == f"{expected} True\n", done.stderr


def test_outputs_that_cannot_be_processed_end_the_engine(model, monkeypatch):
    """Whoever else waits for one of them would wait for ever."""
    llm = LLM(str(model), dtype="float32", device="cpu", max_model_len=64)
    cause = ValueError("no such token")
    monkeypatch.setattr(llm.llm_engine.frontend, "process", Mock(side_effect=cause))
    for _ in range(2):
        with pytest.raises(
            EngineDeadError, match="the engine has ended: ValueError: no such token"
        ) as caught:
            llm.generate("abc", SamplingParams(**GREEDY))
        assert caught.value.__cause__ is cause


def test_a_request_that_cannot_be_queued_leaves_nothing(llm):
    good, bad = {"prompt_token_ids": [1]}, {"prompt_token_ids": [1], "cache_salt": "\ud800"}
    with pytest.raises(RequestError, match="prompt 1: cache_salt"):
        llm.generate([good, bad], SamplingParams(**GREEDY))
    assert not llm.llm_engine.has_unfinished_requests()
    assert nothing_left(llm)
