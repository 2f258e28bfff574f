"""Drafts in a worker: the batch that verifies them, and what is accepted; against rows one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchsched import StepPlan
from enginecore.worker.runner.drafts import accept, draft_tokens, spread_drafts
from steps import ids


def make_plan(rows):
    """A plan of `rows`: (row, start, tokens that are known, drafts, whether it samples)."""
    numbers, starts, known, drafts, samples = zip(*rows)
    return StepPlan(
        1,
        ids(*numbers),
        ids(*starts),
        ids(*(count + len(guesses) for count, guesses in zip(known, drafts))),
        np.array(samples),
        [],
        ids(),
        ids(*map(len, drafts)),
        ids(*(token for guesses in drafts for token in guesses)),
    )


@st.composite
def plans(draw):
    rows = []
    for number in draw(st.permutations(range(6)))[: draw(st.integers(1, 6))]:
        samples = draw(st.booleans())
        guesses = draw(st.lists(st.integers(0, 3), max_size=4)) if samples else []
        rows.append((number, draw(st.integers(0, 50)), draw(st.integers(1, 5)), guesses, samples))
    return rows


def test_each_draft_is_a_row_of_its_own():
    plan = make_plan([(4, 10, 1, [7, 8], True), (1, 0, 5, [], False), (2, 3, 2, [9], True)])
    spread = spread_drafts(plan)
    assert spread.rows.tolist() == [4, 4, 4, 1, 2, 2]
    assert spread.starts.tolist() == [10, 11, 12, 0, 3, 5]
    assert spread.counts.tolist() == [1, 1, 1, 5, 2, 1]
    assert spread.samples.tolist() == [True, True, True, False, True, True]
    assert [column.tolist() for column in draft_tokens(plan)] == [[4, 4, 2], [11, 12, 5], [7, 8, 9]]


@given(plans())
def test_a_plan_runs_the_positions_that_its_spread_runs(rows):
    plan = make_plan(rows)
    spread = spread_drafts(plan)
    assert spread.num_tokens == plan.num_tokens
    ran = [
        (row, position)
        for batch in (plan, spread)
        for row, start, count in zip(*(column.tolist() for column in batch[1:4]))
        for position in range(start, start + count)
    ]
    assert ran[: plan.num_tokens] == ran[plan.num_tokens :]
    expected = [
        (row, start + known + number, token)
        for row, start, known, guesses, _ in rows
        for number, token in enumerate(guesses)
    ]
    assert list(zip(*(column.tolist() for column in draft_tokens(plan)))) == expected


@given(plans(), st.data())
def test_drafts_are_accepted_up_to_the_first_that_was_not_sampled(rows, data):
    plan = make_plan(rows)
    sampled, kept, counts = [], [], []
    for _, _, _, guesses, samples in rows:
        if not samples:
            continue
        drawn = data.draw(st.lists(st.integers(-1, 3), min_size=len(guesses) + 1, max_size=len(guesses) + 1))
        count = 1
        while count <= len(guesses) and drawn[count - 1] == guesses[count - 1]:
            count += 1
        sampled += drawn
        kept += [True] * count + [False] * (len(drawn) - count)
        counts.append(count)
    accepted = accept(plan, ids(*sampled))
    assert accepted.kept.tolist() == kept
    assert accepted.counts.tolist() == counts
    assert accepted.counts.dtype == np.int32
