"""With drafts, right and wrong ones, requests get what they get without: tokens, ends, log probabilities."""

import random

import numpy as np
import pytest
from msgspec.structs import replace

from checkpoints import gemma_config, gpt2_config, llama_config, mixtral_config, save_random
from cores import Ask, collect, message, run, start_core
from enginecore.config import make_config
from enginecore.core.drafts import Drafts
from enginecore.core.engine_core import EngineCore
from enginecore.executor.executor import make_executor
from enginecore.executor.inproc import InprocExecutor
from enginecore.messages import LENGTH, STOP
from enginecore.model_files import locate
from enginecore.sampling_params import SamplingParams
from executors import Smaller, assert_same, options

LOOKUP = {"method": "ngram", "num_speculative_tokens": 64, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
"""So many that steps of many rows have drafts too."""
DRAFTS = 4

VARIANTS = (
    {},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.9, "top_k": 40, "logprobs": 2},
    {"repetition_penalty": 1.2, "logprobs": 0},
    {"temperature": 0.7, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"logit_bias": {65: 3.0, 66: -100.0}, "prompt_logprobs": 1},
    {"min_tokens": 9, "temperature": 0.9},
    {"allowed_token_ids": [5, 6, 7], "temperature": 1.0},
)


class Hints:
    """Proposes what requests will get, which it was told, with some of the tokens wrong."""

    def __init__(self, asks, answers, wrong=0.25):
        self._texts = [[*ask.prompt, *answer.tokens] for ask, answer in zip(asks, answers, strict=True)]
        self._wrong = wrong
        self._random = random.Random(0)

    def begin(self, row):
        pass

    def propose(self, rows, tokens, num_tokens):
        given = []
        for row in rows.tolist():
            known = tokens[row, : num_tokens[row]].tolist()
            following = next((text[len(known) :] for text in self._texts if text[: len(known)] == known), [])
            guesses = [self._guess(token) for token in (following + [0] * DRAFTS)[:DRAFTS]]
            given.append(guesses)
        return Drafts(rows, np.array(given, np.int32))

    def _guess(self, token):
        return self._random.randrange(256) if self._random.random() < self._wrong else token


def params(**settings):
    return SamplingParams(**{"temperature": 0, **settings})


def copying(count, *, seed=0, variants=VARIANTS):
    """Requests whose prompts repeat themselves, some of them with a prefix in common; some end early."""
    rng = random.Random(seed)
    prefix = [rng.randrange(256) for _ in range(20)]
    asks = []
    for number in range(count):
        pattern = [rng.randrange(256) for _ in range(rng.randint(1, 9))]
        prompt = prefix * (number % 2) + pattern * rng.randint(1, 4)
        stops = [rng.randrange(256) for _ in range(6)] if number % 3 else []
        settings = params(**variants[number % len(variants)])
        asks.append(Ask(prompt, rng.randint(10, 30), settings, stops, seed=number))
    return asks


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_random(llama_config(), tmp_path_factory.mktemp("m-rand"))


@pytest.fixture(scope="module")
def truth(model):
    asks = copying(24)
    answers = run(start_core(model, enable_prefix_caching=False), asks)
    assert {answer.finish for answer in answers} == {STOP, LENGTH}
    return asks, answers


def speculating(model, hints=None, *, depth=1, **more):
    """A core in this process; its drafts are prompt lookup's, or those of `hints`."""
    config = make_config(
        {
            **{"model": str(model), "dtype": "float32", "device": "cpu", "speculative_config": LOOKUP},
            **more,
        }
    )
    executor = InprocExecutor(config, locate(config.model))
    executor.depth = depth
    return EngineCore(config, executor, proposer=hints)


SCHEDULES = {
    "together": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "chunks": {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 5},
    "few rows": {"max_num_seqs": 3},
    "blocks of 3": {"block_size": 3},
    "time slices": {"scheduling_policy": "time_slice", "time_slice_tokens": 4, "max_num_seqs": 5},
    "overlapping steps": {"depth": 3},
    "operation by operation": {"enforce_eager": True, "max_num_seqs": 4},
}


@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
def test_prompt_lookup_changes_no_answer(model, truth, options):
    asks, expected = truth
    core = speculating(model, **options)
    assert_same(run(core, asks), expected)
    assert core.stats().num_draft_tokens > 0


@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
def test_right_and_wrong_drafts_change_no_answer(model, truth, options):
    asks, expected = truth
    core = speculating(model, Hints(asks, expected), **options)
    assert_same(run(core, asks), expected)
    stats = core.stats()
    assert 0.3 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.9


BLOCK_GIB = 2 * 2 * 2 * 4 * 16 * 4 / 2**30
"""A block of 4 tokens: layers, keys and values, heads, tokens, channels, bytes."""

PREEMPTING = {
    "recompute": {},
    "swap": {"preemption_mode": "swap", "swap_space": 0.01},
    "swap to few blocks": {"preemption_mode": "swap", "swap_space": 3 * BLOCK_GIB},
}


@pytest.mark.parametrize("budget", [2048, 16])
@pytest.mark.parametrize("options", PREEMPTING.values(), ids=PREEMPTING)
def test_preempted_as_undisturbed(model, truth, options, budget):
    asks, expected = truth
    core = speculating(
        model,
        Hints(asks, expected),
        block_size=4,
        num_blocks_override=26,
        max_model_len=100,
        max_num_batched_tokens=budget,
        **options,
    )
    assert_same(run(core, asks), expected)
    stats = core.stats()
    assert stats.preemptions > 1
    assert stats.num_accepted_tokens > 0


def test_a_cached_block_has_accepted_tokens_only(model):
    """The second request goes on from what the first one generated, where many drafts were wrong."""
    ask = Ask([7, 8, 9], 60)
    plain = start_core(model, block_size=4)
    (first,) = run(plain, [ask])
    longer = Ask([*ask.prompt, *first.tokens, 3, 1, 4], 12, params(logprobs=2, prompt_logprobs=None))
    (second,) = run(start_core(model, enable_prefix_caching=False), [longer])
    for wrong in (0.0, 0.3, 1.0):
        core = speculating(model, Hints([ask], [first], wrong), block_size=4)
        assert_same(run(core, [ask]), [first])
        (got,) = run(core, [longer])
        assert_same([got], [second])
        # All that the first one computed: every token but the last.
        assert got.cached == (len(ask.prompt) + len(first.tokens) - 1) // 4 * 4
    stats = speculating(model, Hints([ask], [first], 0.0), block_size=4)
    run(stats, [ask])
    assert stats.stats().num_accepted_tokens == stats.stats().num_draft_tokens > 40


def test_an_end_among_accepted_drafts_is_where_it_is_without(model):
    (whole,) = run(start_core(model), [Ask([7, 8, 9], 40)])
    for max_tokens in range(1, 14):
        core = speculating(model, Hints([Ask([7, 8, 9])], [whole], 0.0))
        (got,) = run(core, [Ask([7, 8, 9], max_tokens)])
        assert (got.tokens, got.finish) == (whole.tokens[:max_tokens], LENGTH)
        stop = whole.tokens[max_tokens]
        end = next(at for at in range(40) if whole.tokens[at] == stop) + 1
        (got,) = run(core, [Ask([7, 8, 9], 40, params(logprobs=1), [stop])])
        assert (got.tokens, got.finish) == (whole.tokens[:end], STOP)
        assert [ids[0] for ids, _, _ in got.logprobs] == got.tokens


@pytest.mark.parametrize("alone", [False, True])
def test_a_request_that_another_core_began_goes_on(model, truth, alone):
    """As after the end of a core, one of them in steps of its own."""
    asks, expected = truth
    core = speculating(model, Hints(asks, expected))
    for number, ask in enumerate(asks[:6]):
        generated = np.array(expected[number].tokens[: number % 3], np.int32)
        core.add(0, replace(message(number, ask), generated=generated, alone=alone and number == 4))
    for number, answer in enumerate(collect(core, 6)):
        assert answer.tokens == expected[number].tokens[number % 3 :]
        assert answer.finish == expected[number].finish
    assert core.stats().num_accepted_tokens > 10


FAMILIES = {
    "gemma2, windows": lambda: gemma_config(2),
    "gpt2, learned positions": gpt2_config,
    "mixtral, experts": mixtral_config,
    "long prompts rotated by their length": lambda: llama_config(
        max_position_embeddings=64,
        rope_scaling={"rope_type": "dynamic", "factor": 4.0},
    ),
}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_families(family, tmp_path):
    path = save_random(family(), tmp_path)
    asks = copying(8, seed=3)
    expected = run(start_core(path), asks)
    core = speculating(path, Hints(asks, expected), block_size=4)
    assert_same(run(core, asks), expected)
    assert core.stats().num_accepted_tokens > 20


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("seed", range(3))
def test_random_loads(model, backend, seed, monkeypatch):
    """Requests that come and go at any time, aborted ones among them."""
    monkeypatch.setenv("OCTAVO_ATTENTION_BACKEND", backend)
    rng = random.Random(seed)
    asks = copying(20, seed=seed + 10)
    expected = run(start_core(model), asks)
    core = speculating(
        model,
        Hints(asks, expected, rng.choice([0.1, 0.5])),
        depth=rng.choice([1, 2]),
        num_blocks_override=rng.choice([12, 64]),
        max_model_len=100,
        max_num_seqs=rng.choice([3, 8]),
        max_num_batched_tokens=rng.choice([9, 64, 2048]),
    )
    for number, ask in enumerate(asks):
        core.add(0, message(number, ask))
    dropped = rng.sample(range(20), 3)
    core.abort(0, dropped)
    kept = [number for number in range(20) if number not in dropped]
    answers = collect(core, 20)
    assert_same([answers[number] for number in kept], [expected[number] for number in kept])
    core.check()
    assert core.stats().kv_cache_usage == 0


GRIDS = [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]


@pytest.mark.parametrize("grid", GRIDS, ids=["tp2", "pp2"])
def test_several_ranks(model, truth, grid):
    asks, expected = truth
    config = options(model, speculative_config=LOOKUP, swap_space=0.01, **grid)
    executor = make_executor(config, locate(config.model))
    try:
        for hints in (None, Hints(asks, expected)):
            core = EngineCore(config, Smaller(executor, num_blocks=24, max_model_len=80), proposer=hints)
            assert_same(run(core, asks), expected)
            assert core.stats().num_accepted_tokens > 0
    finally:
        executor.shutdown()
