"""Experts shared over data-parallel ranks, with real processes: answers of one engine, and nobody hangs."""

import random
import time

import numpy as np
import pytest

from checkpoints import llama_config, mixtral_config, qwen3_moe_config, save_random
from cores import Ask, run, start_core
from enginecore import SamplingParams
from enginecore.messages import Ready, ReportExpertLoads
from executors import options
from rank_group import RankGroup

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

CONFIGS = {"mixtral": mixtral_config(), "qwen3_moe": qwen3_moe_config()}


@pytest.fixture(scope="module", params=CONFIGS)
def model(request, tmp_path_factory):
    return save_random(CONFIGS[request.param], tmp_path_factory.mktemp(request.param))


def start(model, folder, **more):
    """Start ranks that share experts and wait until they are ready."""
    config = options(model, **{"data_parallel_size": 2, "enable_expert_parallel": True, **more})
    group = RankGroup(config, folder)
    found = group.ready()
    assert all(isinstance(each, Ready) and each.limits.lockstep for each in found), found
    return group


@pytest.fixture(scope="module")
def ranks(model, tmp_path_factory):
    group = start(model, tmp_path_factory.mktemp("ranks"))
    yield group
    assert group.close() == []


def alone(model, asks, **more):
    """Return the answers of one engine, each request by itself."""
    core = start_core(model, enable_prefix_caching=False, **more)
    return [run(core, [ask])[0].tokens for ask in asks]


def random_asks(count, seed=0):
    """Greedy and seeded requests of all lengths."""
    rng = random.Random(seed)
    return [
        Ask(
            [rng.randrange(256) for _ in range(rng.randint(1, 60))],
            rng.randint(1, 40),
            SamplingParams(temperature=rng.choice([0, 0.8])),
            seed=number,
        )
        for number in range(count)
    ]


def idle(group):
    """Wait until the group is between waves, and return the coordinator's account of them."""
    until = time.monotonic() + 60
    while True:
        status = group.status()
        # One that was just started anew knows of nobody yet.
        if len(status.ranks) == 2 and status.waves is not None and not status.waves.running:
            return status.waves
        assert time.monotonic() < until, status
        group.take(0.05)


def test_a_request_on_one_rank_while_the_other_idles(model, ranks):
    before = idle(ranks)
    asks = [Ask([1, 2, 3], 20), Ask([250] * 70, 50)]
    for number, ask in enumerate(asks):
        ranks.add(number % 2, 0, ask)
        assert [answer.tokens for answer in ranks.collect().values()] == alone(model, [ask])
        after = idle(ranks)
        assert after.ended == before.ended + 1
        # A wave ends with a question that comes every 32 steps, and the ranks report both parts of it.
        assert (after.steps - before.steps) % 32 == 0
        before = after


def test_no_step_and_hardly_any_cpu_between_waves(ranks):
    before = idle(ranks)
    processes = ranks.processes()
    assert len(processes) == 4  # two cores, a worker each
    used = cpu_seconds(processes)
    ranks.take(2.0)
    assert cpu_seconds(processes) - used < 0.4
    after = idle(ranks)
    assert (after.ended, after.steps) == (before.ended, before.steps)


def cpu_seconds(processes):
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def test_a_longer_request_that_is_aborted_leaves_the_other_alone(model, ranks):
    asks = [Ask([5], 8), Ask([6], 300)]
    for rank, ask in enumerate(asks):
        ranks.add(rank, 1, ask)
    while ranks.tokens_of(1, 1) < 4:
        ranks.take(1.0)
    ranks.abort(1, 1)
    assert [answer.tokens for answer in ranks.collect().values()] == alone(model, asks[:1])
    idle(ranks)


def test_an_abort_before_the_wave_has_begun(model, ranks):
    idle(ranks)
    ranks.add(0, 2, Ask([5], 300))
    ranks.abort(0, 2)
    ranks.add(1, 2, Ask([9], 6))
    assert [answer.tokens for answer in ranks.collect().values()] == alone(model, [Ask([9], 6)])
    idle(ranks)


def test_a_prompt_of_nearly_the_whole_context(model, ranks):
    asks = [Ask(list(range(200)) + list(range(200)) + list(range(109)), 50), Ask([3], 12)]
    for rank, ask in enumerate(asks):
        ranks.add(rank, 3, ask)
    assert [answer.tokens for answer in ranks.collect().values()] == alone(model, asks)


def test_random_arrivals(model, ranks):
    asks = random_asks(200)
    expected = alone(model, asks)
    rng = random.Random(1)
    answers = {}
    for number, ask in enumerate(asks):
        ranks.add(rng.randrange(2), 100 + number, ask)
        if rng.random() < 0.05:
            answers |= ranks.collect()
            if rng.random() < 0.5:
                idle(ranks)
        elif rng.random() < 0.5:
            ranks.take(rng.random() / 20)
    answers |= ranks.collect()
    got = {number - 100: answer.tokens for (_, number), answer in answers.items()}
    assert [got[number] for number in range(200)] == expected
    assert idle(ranks).ended >= 3


def test_a_coordinator_that_dies_in_a_wave_and_between_waves(model, ranks):
    asks = [Ask([7], 100), Ask([8], 10)]
    expected = alone(model, asks)
    for in_wave in (True, False):
        idle(ranks)
        ranks.add(0, 500 + in_wave, asks[0])
        if in_wave:
            while ranks.tokens_of(0, 501) < 2:
                ranks.take(1.0)
        ranks.kill_coordinator()
        ranks.add(1, 500 + in_wave, asks[1])
        assert [answer.tokens for answer in ranks.collect().values()] == expected
    idle(ranks)


def loads_of(group):
    """Return the loads that all ranks report together."""
    for rank in range(2):
        group.send(rank, ReportExpertLoads())
    return sum(group.other(rank).tokens for rank in range(2))


def test_expert_loads_in_a_wave_and_between_waves(model, ranks):
    idle(ranks)
    before = loads_of(ranks)
    asks = random_asks(6, seed=2)
    for number, ask in enumerate(asks):
        ranks.add(number % 2, 600 + number, ask)
    loads_of(ranks)
    ranks.collect()
    core = start_core(model, enable_prefix_caching=False)
    run(core, asks)
    # Prefixes from the cache are not run again: these prompts have none in common.
    np.testing.assert_array_equal(loads_of(ranks) - before, core.expert_loads())


@pytest.mark.parametrize(
    "more",
    [
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2},
        {"async_scheduling": True, "num_blocks_override": 7, "max_model_len": 100},
        {"max_num_batched_tokens": 16, "max_num_seqs": 4, "long_prefill_token_threshold": 5},
    ],
    ids=["stages", "tensor parallel", "two steps under way and few blocks", "small chunks"],
)
def test_other_ways_to_run(more, tmp_path_factory):
    """With few blocks requests are preempted, and wait for others to end."""
    path = save_random(mixtral_config(), tmp_path_factory.mktemp("model"))
    asks = random_asks(24, seed=3)
    expected = alone(path, asks)
    group = start(path, tmp_path_factory.mktemp("ranks"), **more)
    try:
        for number, ask in enumerate(asks):
            # All but a few go to one rank.
            group.add(number % 6 == 5, number, ask)
        answers = group.collect()
        idle(group)
        group.add(1, 100, asks[0])
        answers |= group.collect()
        got = {number: answer.tokens for (_, number), answer in answers.items()}
        assert [got[number] for number in range(24)] == expected
        assert got[100] == expected[0]
    finally:
        assert group.close() == []


def test_ranks_of_a_dense_model_run_by_themselves(tmp_path_factory):
    path = save_random(llama_config(), tmp_path_factory.mktemp("model"))
    config = options(path, data_parallel_size=2)
    group = RankGroup(config, tmp_path_factory.mktemp("ranks"))
    try:
        assert [ready.limits.lockstep for ready in group.ready()] == [False, False]
        assert len(group.processes()) == 2  # workers are in the cores' own processes
        group.suspend(1)
        group.add(0, 0, Ask([4, 5], 30))
        answers = group.collect()
        group.resume(1)
        assert [answer.tokens for answer in answers.values()] == alone(path, [Ask([4, 5], 30)])
        assert group.status().waves is None
    finally:
        assert group.close() == []


def test_a_dense_model_has_no_experts_to_share(tmp_path_factory):
    path = save_random(llama_config(), tmp_path_factory.mktemp("model"))
    config = options(path, data_parallel_size=2, enable_expert_parallel=True)
    group = RankGroup(config, tmp_path_factory.mktemp("ranks"))
    try:
        said = {failed.message for failed in group.ready()}
        assert said == {"enable_expert_parallel: the model has no experts"}
    finally:
        assert group.close() == []
