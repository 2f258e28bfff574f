"""Pipeline microbatches: as many steps in flight as there are stages, and rows to run in each of them."""

import random

import pytest

from batchsched import Finish


def start(engine, stages, rows, max_tokens=100, **limits):
    """An engine whose rows have all had their prompts run, and `stages` steps in flight from then on."""
    e = engine(
        num_blocks=2000,
        stages=stages,
        max_num_seqs=64,
        max_num_batched_tokens=256,
        max_model_len=200,
        **limits,
    )
    for handle in range(rows):
        e.add(handle, prompt=3, max_tokens=max_tokens)
    if rows:
        e.plan()
        e.commit()
    fill(e)
    return e


def fill(e):
    """Plan until there are as many steps in flight as stages, or nothing is left to plan."""
    while len(e.plans) < e.limits.stages and e.plan().rows.size:
        pass


def next_step(e):
    """Commit the oldest step, and return how many rows each of those in flight then has."""
    e.commit()
    fill(e)
    return [plan.rows.size for plan in e.plans]


@pytest.mark.parametrize(
    ("stages", "rows", "sizes"),
    [
        (2, 2, [1, 1]),
        (2, 5, [3, 2]),
        (3, 3, [1, 1, 1]),
        (3, 7, [3, 2, 2]),
        (4, 5, [2, 1, 1, 1]),
        (4, 9, [3, 2, 2, 2]),
        (8, 64, [8] * 8),
    ],
)
def test_every_microbatch_has_its_share_of_the_rows(engine, stages, rows, sizes):
    e = start(engine, stages, rows)
    assert [plan.rows.size for plan in e.plans] == sizes
    for step in range(1, 40):
        assert next_step(e) == [sizes[(step + place) % stages] for place in range(stages)]
    e.drain(depth=stages - 1)
    e.check_answers()


def test_a_row_whose_newest_token_is_in_flight_is_left_out(engine):
    e = engine(num_blocks=8, stages=2)
    e.add(1, prompt=3, max_tokens=2)
    assert e.ran(e.plan()) == {1: (0, 3, "*")}
    assert e.ran(e.plan()) == {}
    e.commit()
    assert e.ran(e.plan()) == {1: (3, 1, "*")}


def test_chunks_of_a_prompt_follow_each_other(engine):
    e = engine(num_blocks=8, max_num_batched_tokens=4, stages=3)
    e.add(1, prompt=10, max_tokens=2)
    assert [e.ran(e.plan()) for _ in range(4)] == [{1: (0, 4)}, {1: (4, 4)}, {1: (8, 2, "*")}, {}]
    e.commit()
    assert e.ran(e.plan()) == {}
    e.drain(depth=2)
    e.check_answers()


def test_chunks_and_decoding_rows_share_the_steps(engine):
    e = engine(num_blocks=40, max_num_batched_tokens=6, stages=2)
    e.add(1, prompt=2, max_tokens=20)
    e.add(2, prompt=2, max_tokens=20)
    assert e.step() == {1: (0, 2, "*"), 2: (0, 2, "*")}
    e.add(3, prompt=13, max_tokens=2)
    assert e.ran(e.plan()) == {1: (2, 1, "*"), 3: (0, 5)}
    assert e.ran(e.plan()) == {2: (2, 1, "*"), 3: (5, 5)}
    e.commit()
    assert e.ran(e.plan()) == {1: (3, 1, "*"), 3: (10, 3, "*")}
    e.drain(depth=1)
    e.check_answers()


def test_microbatches_even_out_when_rows_have_ended(engine):
    e = engine(num_blocks=100, stages=2, max_num_seqs=8)
    for handle in range(8):
        e.add(handle, prompt=3, max_tokens=40 if handle < 4 else 3)
    e.plan()
    e.commit()
    fill(e)
    assert [sorted(e.ran(plan)) for plan in e.plans] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for _ in range(6):
        sizes = next_step(e)
    assert sizes == [2, 2]
    assert all(e.finished[handle] == Finish.LENGTH for handle in range(4, 8))
    e.drain(depth=1)
    e.check_answers()


def test_new_rows_are_spread_over_the_microbatches(engine):
    e = start(engine, stages=4, rows=4)
    for handle in range(4, 12):
        e.add(handle, prompt=5, max_tokens=100)
    for _ in range(12):
        sizes = next_step(e)
    assert sizes == [3, 3, 3, 3]


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_each_row_has_a_token_every_stages_steps(engine, stages):
    """While no row comes or goes, whatever its place in the running queue."""
    e = start(engine, stages, rows=11)
    for _ in range(3):
        sampled = []
        for _ in range(stages):
            sampled += e.plans[0].rows.tolist()
            next_step(e)
        assert sorted(sampled) == list(range(11))


@pytest.mark.parametrize(
    ("stages", "budget", "memory"),
    [
        (2, 1, {}),
        (2, 7, {"prefix_cache": True}),
        (2, 64, {"host_blocks": 6}),
        (3, 1, {"prefix_cache": True}),
        (3, 7, {"host_blocks": 6}),
        (3, 64, {}),
        (5, 1, {"host_blocks": 6}),
        (5, 7, {}),
        (5, 64, {"prefix_cache": True}),
    ],
)
def test_stages_give_the_same_answers(engine, stages, budget, memory):
    e = engine(
        num_blocks=9,
        max_num_seqs=5,
        max_num_batched_tokens=budget,
        max_model_len=33,
        stages=stages,
        **memory,
    )
    for handle in range(9):
        stop_ids = tuple((handle * 31 + position * 7) % 97 for position in range(handle, 33, handle + 5))
        e.add(handle, prompt=1 + handle * 3 % 10, max_tokens=25, stop_ids=stop_ids, min_tokens=handle)
    e.drain(depth=stages - 1)
    e.check_answers()
    if budget == 64:
        assert e.scheduler.load().preemptions > 0


@pytest.mark.parametrize("seed", range(6))
def test_microbatches_are_even_again_soon_after_a_change(engine, seed):
    """At the latest when two steps for each stage were planned while the same rows decode."""
    rng = random.Random(seed)
    stages = rng.randint(2, 6)
    e = start(engine, stages, rows=0)
    queue, unchanged, checked = [], 0, 0
    for step in range(400):
        if step < 200 and rng.random() < 0.05:
            e.add(step, prompt=rng.randint(1, 5), max_tokens=rng.randint(2, 100))
        sizes = next_step(e) if e.plans else fill(e) or []
        before, queue = queue, e.scheduler._rows.queue.tolist()  # those with another step to come
        unchanged = unchanged + 1 if queue == before else 0
        if unchanged > 2 * stages:
            shares = [(len(queue) + place) // stages for place in range(stages)]
            assert sorted(sizes) == [share for share in shares if share]
            checked += 1
    assert checked > 50
    e.drain(depth=stages - 1)
    e.check_answers()
