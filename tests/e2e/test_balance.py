"""Several ranks behind one port: answers of one engine, spread evenly by any number of front-ends."""

import asyncio
from pathlib import Path

import pytest

from mixed_load import Load, differences, equal, mixed, write_model
from parallel_server import FLAGS, ParallelServer, by_rank, wait_until_idle

pytestmark = [pytest.mark.slow, pytest.mark.alone]

MIXED = mixed(400, least=8, most=24)
EQUAL = equal(400, tokens=12)
BURST = equal(64, tokens=30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def right(model):
    with ParallelServer(model, *FLAGS) as server:
        return asyncio.run(Load(server.url).run(MIXED))


def spread(server, bodies):
    """Send requests at once; return the answers, and what each rank has generated."""
    before = by_rank(server.counts(), "octavo_generation_tokens_total")
    answers = asyncio.run(Load(server.url).run(bodies))
    wait_until_idle(server)
    after = by_rank(server.counts(), "octavo_generation_tokens_total")
    return answers, [after[rank] - before[rank] for rank in sorted(after)]


def apart(counts):
    """How far the most loaded rank is above the mean, and the least loaded one below."""
    mean = sum(counts) / len(counts)
    return max(max(counts) / mean - 1, 1 - min(counts) / mean)


@pytest.mark.parametrize("front_ends", [1, 4])
@pytest.mark.parametrize("ranks", [2, 4])
def test_answers_and_balance(model, right, ranks, front_ends):
    flags = ("--data-parallel-size", str(ranks), "--api-server-count", str(front_ends))
    with ParallelServer(model, *FLAGS, *flags) as server:
        answers, counts = spread(server, MIXED)
        assert differences(answers, right) == {}
        assert apart(counts) <= 0.25, counts
        rounds = [spread(server, EQUAL)[1] for _ in range(3)]
        assert [sum(counts) for counts in rounds] == [400 * 12] * 3
        # A rank that something else on the machine slows down for one round gets fewer requests then.
        assert apart([sum(counts) for counts in zip(*rounds)]) <= 0.10, rounds
        answers, counts = spread(server, BURST)
        assert sum(counts) == 64 * 30
        assert apart(counts) <= 0.25, counts
        if front_ends > 1:
            body = {"prompt": "the same", "max_tokens": 24, "ignore_eos": True, "temperature": 1.0}
            drawn, _ = spread(server, [body] * 32)
            assert len({answer["choices"][0]["text"] for answer in drawn}) == 32
        assert server.terminate() == 0


def test_four_tensor_parallel_ranks(model, right):
    """Four front-ends, four cores, eight workers and a coordinator."""
    flags = ("--data-parallel-size", "4", "--tensor-parallel-size", "2")
    with ParallelServer(model, *FLAGS, *flags) as server:
        roles = ("http", "rank", "worker", "coordinator")
        assert [len(server.processes(role)) for role in roles] == [4, 4, 8, 1]
        answers, _ = spread(server, MIXED[:32])
        assert differences(answers, right[:32]) == {}
        assert server.terminate() == 0
