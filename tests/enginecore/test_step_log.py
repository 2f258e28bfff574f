"""What a core records of its steps while somebody watches, and that it records nothing otherwise."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsched import StepPlan
from enginecore.core.step_log import DELIVER, IDLE, MOST_CELLS, PLAN, RUN, StepLog, block_map
from enginecore.core.watchers import Watchers
from enginecore.messages import STEP_COLUMNS, WATCHED_STEPS, StepsView


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plan(counts: list[int], samples: list[bool], drafts: list[int] | None = None) -> StepPlan:
    return StepPlan.empty()._replace(
        step=1,
        rows=np.arange(len(counts), dtype=np.int32),
        counts=np.array(counts, np.int32),
        samples=np.array(samples),
        num_drafts=np.array(drafts or [0] * len(counts), np.int32),
    )


def test_a_step_has_its_tokens_and_its_time_by_phase():
    clock = Clock()
    log = StepLog(clock)
    for phase, seconds in ((IDLE, 1), (PLAN, 2), (RUN, 4), (RUN, 8), (DELIVER, 16)):
        clock.now += seconds
        log.spent(phase)
    # A chunk that does not reach the newest token, a prompt's last chunk, a decode, a decode with drafts.
    log.ran(plan([16, 5, 1, 4], [False, True, True, True], [0, 0, 0, 3]))
    log.record()
    clock.now += 32
    log.spent(PLAN)
    log.ran(plan([1], [True]))
    log.record()
    log.record()  # nothing has run since
    rows = [dict(zip(STEP_COLUMNS, row, strict=True)) for row in log.drain().tolist()]
    assert rows == [
        {"prefill": 21, "decode": 5, "rows": 4, "idle": 1, "plan": 2, "run": 12, "deliver": 16},
        {"prefill": 0, "decode": 1, "rows": 1, "idle": 0, "plan": 32, "run": 0, "deliver": 0},
    ]
    assert log.drain().shape == (0, len(STEP_COLUMNS))


def test_the_newest_steps_are_kept():
    log = StepLog()
    for count in range(WATCHED_STEPS + 50):
        log.ran(plan([1] * (count + 1), [True] * (count + 1)))
        log.record()
    rows = log.drain()
    assert rows[:, 2].tolist() == list(range(51, WATCHED_STEPS + 51))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 3 * MOST_CELLS))
def test_a_cell_has_the_state_that_most_of_its_blocks_have(pattern, count):
    states = np.resize(np.array(pattern, np.int8), count)
    cells = block_map(states)
    size = -(-count // MOST_CELLS)
    assert cells.dtype == np.int8
    assert cells.size == -(-count // size) <= MOST_CELLS
    for place in (0, cells.size // 2, cells.size - 1):
        mine = states[place * size : (place + 1) * size].tolist()
        most = max(mine.count(state) for state in range(4))
        assert cells[place] == max(state for state in range(4) if mine.count(state) == most)


class Core:
    def __init__(self) -> None:
        self.step_log: StepLog | None = None
        self.maps: list[bool] = []

    def steps_view(self, *, with_blocks: bool) -> StepsView:
        assert self.step_log is not None
        self.maps.append(with_blocks)
        return StepsView(self.step_log.drain())


def test_nothing_is_recorded_or_sent_while_nobody_watches():
    core, clock = Core(), Clock()
    watchers = Watchers(core, clock)
    watchers.stepped()
    watchers.waited()
    assert (watchers.view(), core.step_log) == (None, None)
    watchers.add(1)
    watchers.add(2)
    assert core.step_log is not None
    watchers.discard(1)
    assert watchers.view() is not None
    watchers.discard(2)
    watchers.discard(2)
    clock.now = 100
    assert (watchers.view(), core.step_log) == (None, None)
    assert core.maps == [True]


def test_views_come_four_times_a_second_and_maps_once():
    core, clock = Core(), Clock()
    watchers = Watchers(core, clock)
    watchers.add(1)
    sent = 0
    for tick in range(400):  # four seconds, in hundredths
        clock.now = tick / 100
        sent += watchers.view() is not None
    assert sent == pytest.approx(16, abs=1)
    assert sum(core.maps) == pytest.approx(4, abs=1)
    # Whoever comes later has a map at once.
    watchers.add(2)
    assert watchers.view() is not None
    assert core.maps[-1]
