"""A request's answer depends on nothing but the request: not on batch, chunks, cache or preemption."""

import random

import numpy as np
import pytest
from transformers import MistralConfig

from checkpoints import llama_config, random_sizes, save_random
from cores import Ask, collect, message, run, start_core
from enginecore.errors import ConfigError
from enginecore.messages import LENGTH, STOP
from enginecore.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_random(llama_config(), tmp_path_factory.mktemp("m-rand"))


def params(**settings):
    return SamplingParams(**{"temperature": 0, **settings})


VARIANTS = {
    "greedy": {},
    "seeded": {"temperature": 0.8},
    "nucleus": {"temperature": 1.2, "top_p": 0.9, "top_k": 40},
    "min_p": {"temperature": 1.5, "min_p": 0.02},
    "repetition": {"repetition_penalty": 1.2},
    "presence and frequency": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    "logprobs": {"temperature": 0.9, "logprobs": 2},
    "bias": {"logit_bias": {65: 3.0, 66: -100.0}},
}


def ragged(count, settings, *, seed=0, shared=0):
    """Requests of ragged lengths; each of the variants in turn; `shared` leading tokens in common."""
    rng = random.Random(seed)
    prefix = [rng.randrange(256) for _ in range(shared)]
    asks = []
    for number in range(count):
        prompt = prefix + [rng.randrange(256) for _ in range(rng.randint(1, 60))]
        asks.append(Ask(prompt, rng.randint(1, 30), params(**settings[number % len(settings)]), seed=number))
    return asks


def alone(core, asks):
    return [run(core, [ask])[0] for ask in asks]


def assert_same(got, expected):
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.finish == theirs.finish
        for (ids, values, rank), (other_ids, other_values, other_rank) in zip(
            mine.logprobs, theirs.logprobs, strict=True
        ):
            assert (ids, rank) == (other_ids, other_rank)
            np.testing.assert_allclose(values, other_values, atol=1e-4)


@pytest.fixture(scope="module")
def truth(model):
    """64 ragged requests of every variant, each alone on a core that caches nothing."""
    asks = ragged(64, list(VARIANTS.values()), shared=20)
    return asks, alone(start_core(model, enable_prefix_caching=False), asks)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 5},
        {"max_num_seqs": 3},
        {"block_size": 7},
    ],
    ids=str,
)
def test_together_as_alone(model, truth, options):
    asks, expected = truth
    assert_same(run(start_core(model, **options), asks), expected)


FEW_BLOCKS = {True: 10, False: 12}
"""Too few for the requests of `truth`, by whether they share prefixes."""


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [2048, 16])
def test_preempted_as_undisturbed(model, truth, caching, budget):
    asks, expected = truth
    core = start_core(
        model,
        num_blocks_override=FEW_BLOCKS[caching],
        max_model_len=128,
        enable_prefix_caching=caching,
        max_num_batched_tokens=budget,
    )
    assert_same(run(core, asks), expected)
    assert core.stats().preemptions > 5


BLOCK_GIB = 2 * 2 * 2 * 16 * 16 * 4 / 2**30
"""A block of the model: layers, keys and values, heads, tokens, channels, bytes."""


@pytest.mark.parametrize("host_blocks", [3, 1000])
@pytest.mark.parametrize("caching", [True, False])
def test_swapped_as_undisturbed(model, truth, caching, host_blocks):
    asks, expected = truth
    core = start_core(
        model,
        num_blocks_override=FEW_BLOCKS[caching],
        max_model_len=128,
        enable_prefix_caching=caching,
        preemption_mode="swap",
        swap_space=host_blocks * BLOCK_GIB,
    )
    assert_same(run(core, asks), expected)
    assert core.stats().preemptions > 5


@pytest.mark.parametrize("preemption", [{}, {"preemption_mode": "swap", "swap_space": 0.01}], ids=str)
@pytest.mark.parametrize(
    "policy",
    [
        {"scheduling_policy": "priority"},
        {"scheduling_policy": "time_slice", "time_slice_tokens": 4},
        {"scheduling_policy": "shortest_first"},
    ],
    ids=str,
)
def test_every_policy_gives_the_same_answers(model, truth, policy, preemption):
    asks, expected = truth
    core = start_core(model, num_blocks_override=20, max_num_seqs=5, **policy, **preemption)
    assert_same(run(core, asks), expected)


def test_blocks_that_were_evicted_come_back_from_the_host(model):
    core = start_core(model, num_blocks_override=4, swap_space=100 * BLOCK_GIB)
    a = Ask([(5 * i) % 256 for i in range(48)], 8)
    first = run(core, [a])[0]
    run(core, [Ask([(7 * i + 1) % 256 for i in range(64)], 1)])
    again = run(core, [a])[0]
    assert (again.cached, again.tokens) == (32, first.tokens)


def test_the_better_priority_goes_first(model):
    core = start_core(model, max_num_seqs=1, scheduling_policy="priority")
    order = []
    for number, priority in enumerate([3, 1, 2]):
        added = message(number, Ask([1, 2, 3], 4))
        added.priority = priority
        core.add(0, added)
    while core.has_work:
        for outputs in core.step().values():
            order += outputs.numbers[outputs.finished > 0].tolist()
    assert order == [1, 2, 0]


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"num_blocks_override": 12, "max_model_len": 128},
        {"num_blocks_override": 12, "max_model_len": 128, "preemption_mode": "swap", "swap_space": 0.01},
        {"num_blocks_override": 20, "scheduling_policy": "time_slice", "time_slice_tokens": 4},
    ],
    ids=str,
)
def test_overlapping_steps_change_nothing(model, truth, options, depth):
    asks, expected = truth
    assert_same(run(start_core(model, depth=depth, **options), asks), expected)


def test_a_stop_is_not_run_past_where_steps_overlap(model):
    free = run(start_core(model), [Ask([1, 2, 3], 10)])[0].tokens
    place = free.index(free[4])
    for depth in (1, 2, 3):
        core = start_core(model, depth=depth)
        stopped, other = run(core, [Ask([1, 2, 3], 10, stop_ids=[free[4]]), Ask([4, 5], 10)])
        assert (stopped.tokens, stopped.finish) == (free[: place + 1], STOP)
        assert other.tokens == run(start_core(model), [Ask([4, 5], 10)])[0].tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 16},
        {"num_blocks_override": 12, "max_model_len": 128},
        {"num_blocks_override": 12, "max_model_len": 128, "preemption_mode": "swap", "swap_space": 0.01},
        {"num_blocks_override": 12, "max_model_len": 128, "swap_space": 0.01, "depth": 2},
    ],
    ids=str,
)
def test_a_sliding_window_changes_nothing(windowed, options):
    model, asks, expected = windowed
    assert_same(run(start_core(model, **options), asks), expected)


def test_a_sliding_window_gives_blocks_back(windowed):
    model, _, _ = windowed
    core = start_core(model, num_blocks_override=10)
    core.add(0, message(0, Ask(list(range(100)), 20)))
    core.step()
    held = []
    while core.stats().running:
        held.append(round(10 * core.stats().kv_cache_usage))
        core.step()
    # A window of 20 tokens lies in at most 3 blocks of 16; without it there would be 7 and 8.
    assert set(held) <= {2, 3}
    core.check()


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """A model whose layers all see 20 tokens, and requests whose answers it gave alone, caching nothing."""
    config = MistralConfig(**random_sizes(), sliding_window=20)
    model = save_random(config, tmp_path_factory.mktemp("windowed"))
    asks = ragged(24, list(VARIANTS.values()), seed=3, shared=40)
    return model, asks, alone(start_core(model, enable_prefix_caching=False), asks)


@pytest.mark.parametrize("length", [16, 32, 33, 48])
def test_a_wholly_cached_prompt(model, length):
    core = start_core(model)
    ask = Ask([(3 * i) % 251 for i in range(length)], 20)
    cold, *warm = (run(core, [ask])[0] for _ in range(3))
    assert cold.cached == 0
    for answer in warm:
        assert answer.tokens == cold.tokens
        assert answer.cached == (length - 1) // 16 * 16
    longer = run(core, [Ask([*ask.prompt, *cold.tokens], 4)])[0]
    assert longer.cached == (length + 19) // 16 * 16


def test_recycled_blocks_forget_their_content(model):
    core = start_core(model, num_blocks_override=4)
    a = Ask([(5 * i) % 256 for i in range(48)], 8)
    b = Ask([(7 * i + 1) % 256 for i in range(64)], 1)
    first = run(core, [a])[0]
    run(core, [b])
    again = run(core, [a])[0]
    assert (again.cached, again.tokens) == (0, first.tokens)


def test_shared_prefixes_in_a_tiny_pool(model):
    rng = random.Random(5)
    prefixes = [[rng.randrange(256) for _ in range(rng.randint(16, 60))] for _ in range(6)]
    asks = []
    for _ in range(120):
        prefix = rng.choice(prefixes)[: rng.randint(1, 60)]
        asks.append(Ask(prefix + [rng.randrange(256) for _ in range(rng.randint(0, 20))], rng.randint(1, 20)))
    expected = alone(start_core(model, enable_prefix_caching=False), asks)
    core = start_core(model, num_blocks_override=8)
    for start in range(0, 120, 6):
        assert_same(run(core, asks[start : start + 6]), expected[start : start + 6])


@pytest.mark.parametrize("budget", [1, 5, 16, 17, 99, 100, 101])
def test_chunks_of_any_size(model, budget):
    ask = Ask([(11 * i) % 256 for i in range(100)], 6)
    expected = run(start_core(model), [ask])[0]
    core = start_core(model, max_num_batched_tokens=budget, max_num_seqs=4)
    for answer in run(core, [ask, ask]):
        assert answer.tokens == expected.tokens


@pytest.mark.parametrize("budget", [256, 24])
def test_equal_prefixes_in_one_step_and_an_abort(model, budget):
    prefix = [(13 * i) % 256 for i in range(64)]
    asks = [Ask([*prefix, 1, 2], 8), Ask([*prefix, 3], 8)]
    expected = alone(start_core(model, enable_prefix_caching=False), asks)
    core = start_core(model, max_num_batched_tokens=budget)
    assert_same(run(core, asks), expected)

    core = start_core(model, max_num_batched_tokens=24)
    core.add(0, message(0, asks[0]))
    core.step()
    core.abort(0, [0])
    core.add(0, message(1, asks[1]))
    assert collect(core, 2)[1].tokens == expected[1].tokens
    core.check()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", ["full attention", "window"])
def test_equal_prompts_in_one_step_compute_their_prefix_once(model, windowed, kind, depth):
    """However it is computed, a request's answer is that of a run alone that caches nothing."""
    folder = model if kind == "full attention" else windowed[0]
    ask = Ask([(13 * i) % 256 for i in range(70)], 8, params(logprobs=2))
    (expected,) = run(start_core(folder, enable_prefix_caching=False), [ask])
    core = start_core(folder, depth=depth)
    answers = run(core, [ask] * 4)
    assert_same(answers, [expected] * 4)
    assert [answer.cached for answer in answers] == [0, 64, 64, 64]
    stats = core.stats()
    assert stats.ran_tokens == 70 + 3 * 6 + 4 * 7
    assert (stats.prefix_queries, stats.prefix_hits) == (4 * 70, 3 * 64)


def test_prompt_logprobs_beside_equal_prompts_in_one_step(model):
    prompt = [(13 * i) % 256 for i in range(40)]
    plain, asking = Ask(prompt, 4), Ask(prompt, 4, params(prompt_logprobs=1))
    expected = run(start_core(model, enable_prefix_caching=False), [asking])[0]
    answers = run(start_core(model), [plain, asking, plain, asking])
    assert [answer.cached for answer in answers] == [0, 0, 32, 0]
    for answer in answers:
        assert answer.tokens == expected.tokens
    for answer in answers[1::2]:
        assert [entry[0] for entry in answer.prompt_logprobs] == [
            entry[0] for entry in expected.prompt_logprobs
        ]


def test_aborts_leave_nothing(model):
    core = start_core(model, max_num_seqs=2)
    for number in range(5):
        core.add(0, message(number, Ask([1, 2, 3], 100)))
    for _ in range(4):
        core.step()
    core.abort(0, [0, 1, 2, 3, 4, 99])
    collect(core, 5)
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.kv_cache_usage) == (0, 0, 0)
    core.check()


def test_stop_ids_and_minimum(model):
    core = start_core(model)
    free = run(core, [Ask([1, 2, 3], 10)])[0].tokens
    stop = free[4]
    place = free.index(stop)
    stopped = run(core, [Ask([1, 2, 3], 10, stop_ids=[stop])])[0]
    assert (stopped.tokens, stopped.finish) == (free[: place + 1], STOP)
    longer = run(core, [Ask([1, 2, 3], 10, params(min_tokens=10, max_tokens=10), stop_ids=[stop])])[0]
    assert stop not in longer.tokens
    assert (len(longer.tokens), longer.finish) == (10, LENGTH)


@pytest.mark.parametrize("prompt", [33, 31, 32, 64])
def test_prompt_logprobs_whatever_is_cached(model, prompt):
    ids = [(17 * i) % 256 for i in range(prompt)]
    ask = Ask(ids, 2, params(prompt_logprobs=1))
    cold = run(start_core(model), [ask])[0].prompt_logprobs
    assert [ids_[0] for ids_, _, _ in cold] == ids[1:]
    core = start_core(model, max_num_batched_tokens=8)
    run(core, [Ask(ids, 2)])
    for _ in range(2):
        warm = run(core, [ask])[0].prompt_logprobs
        assert [entry[0] for entry in warm] == [entry[0] for entry in cold]
        np.testing.assert_allclose([e[1] for e in warm], [e[1] for e in cold], atol=1e-4)


def test_prompt_logprobs_through_preemption(model):
    asks = [Ask([(i * k) % 256 for i in range(50)], 30, params(prompt_logprobs=0)) for k in (3, 5, 7, 9)]
    expected = alone(start_core(model), asks)
    core = start_core(model, num_blocks_override=8, max_num_batched_tokens=24)
    answers = run(core, asks)
    assert core.stats().preemptions > 0
    for mine, theirs in zip(answers, expected, strict=True):
        assert mine.tokens == theirs.tokens
        assert [e[0] for e in mine.prompt_logprobs] == [e[0] for e in theirs.prompt_logprobs]
        np.testing.assert_allclose(
            [e[1] for e in mine.prompt_logprobs], [e[1] for e in theirs.prompt_logprobs], atol=1e-4
        )


def test_a_refused_request_is_answered_and_harms_no_one(model):
    core = start_core(model, num_blocks_override=4, max_model_len=65)
    core.add(0, message(0, Ask([1] * 200, 5)))
    core.add(1, message(0, Ask([1, 2], 3)))
    errors, tokens = {}, []
    while core.has_work:
        outputs = core.step()
        errors |= outputs[0].errors if 0 in outputs else {}
        tokens += outputs[1].tokens.tolist() if 1 in outputs else []
    assert list(errors) == [0]
    assert errors[0].startswith("This model's maximum context length is ")
    assert "200" in errors[0] and "65" in errors[0]
    assert len(tokens) == 3


def test_clients_get_their_own_tokens_only(model):
    core = start_core(model)
    asks = {0: Ask([1, 2, 3], 5), 1: Ask([4, 5], 7)}
    for client, ask in asks.items():
        core.add(client, message(7, ask))
    got = {0: [], 1: []}
    while core.has_work:
        for client, outputs in core.step().items():
            assert set(outputs.numbers.tolist()) <= {7}
            got[client] += outputs.tokens.tolist()
    expected = alone(start_core(model), asks.values())
    assert [got[0], got[1]] == [answer.tokens for answer in expected]


def test_a_cache_salt_keeps_requests_apart(model):
    core = start_core(model)
    prompt = list(range(40))

    def cached(salt):
        added = message(0, Ask(prompt, 1))
        added.cache_salt = salt
        core.add(0, added)
        return collect(core, 1)[0].cached

    assert [cached(None), cached(None), cached("a"), cached("a"), cached("b")] == [0, 32, 0, 32, 0]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"num_blocks_override": 8, "max_model_len": 512}, ["512", "32", "129"]),
        ({"num_blocks_override": 0}, ["num_blocks_override must be at least 1"]),
        ({"kv_cache_memory_bytes": 100}, ["no block", "8.0 KiB", "100 bytes"]),
        ({"kv_cache_memory_bytes": 1 << 50}, ["1125899906842624", "free"]),
        ({"max_model_len": 4096}, ["4096", "512"]),
        ({"swap_space": 1e6}, ["swap_space", "free"]),
        ({"preemption_mode": "swap"}, ["needs swap_space"]),
    ],
)
def test_limits_that_contradict_the_memory(model, options, parts):
    with pytest.raises(ConfigError) as error:
        start_core(model, **options)
    for part in parts:
        assert part in str(error.value)


def test_a_length_limit_that_was_not_asked_for_is_lowered_to_what_fits(model):
    core = start_core(model, num_blocks_override=8)
    assert core.limits.max_model_len == 129
    exactly = run(core, [Ask([1] * 64, 65)])[0]
    assert len(exactly.tokens) == 65
