"""Columns of running rows: stop ids, and draft tokens that a step verifies. Blocks hold 4 tokens."""

import numpy as np
import pytest

from batchsched import Finish, StepMismatch, StepResult
from batchsched.running import StopIds


class TestStopIds:
    def matches(self, stops, *pairs):
        rows, tokens = zip(*pairs)
        return stops.match(np.array(rows), np.array(tokens, np.int32)).tolist()

    def test_each_row_has_its_own(self):
        stops = StopIds(4)
        stops.set(0, (5, 6))
        stops.set(2, (7,))
        assert self.matches(stops, (0, 5), (1, 5), (2, 5), (3, 5)) == [True, False, False, False]
        assert self.matches(stops, (2, 7), (0, 6)) == [True, True]

    def test_a_row_without_stop_ids_matches_nothing(self):
        assert self.matches(StopIds(2), (0, 0), (1, 2**31 - 1)) == [False, False]

    def test_more_ids_than_columns(self):
        stops = StopIds(3)
        stops.set(0, tuple(range(100)))
        stops.set(1, (100,))
        assert self.matches(stops, (0, 99), (1, 99), (2, 99)) == [True, False, False]
        assert self.matches(stops, (0, 100), (1, 100), (2, 100)) == [False, True, False]

    def test_setting_a_row_replaces_its_ids(self):
        stops = StopIds(2)
        stops.set(0, tuple(range(100)))
        stops.set(0, (1, 2, 3))
        assert self.matches(stops, (0, 99)) == [False]
        assert self.matches(stops, (0, 3)) == [True]
        stops.set(0, (4,))
        assert self.matches(stops, (0, 3)) == [False]
        assert self.matches(stops, (0, 4)) == [True]
        stops.set(0, ())
        assert self.matches(stops, (0, 4)) == [False]


def test_accepted_drafts_and_the_token_after_them_are_committed(engine):
    e = engine(num_blocks=8)
    e.add(1, prompt=3, max_tokens=9, max_drafts=3)
    e.step()
    e.draft(1, right=3)
    plan = e.plan()
    assert e.ran(plan) == {1: (3, 4, "*")}
    assert (plan.num_drafts.tolist(), plan.drafts.size, plan.num_tokens) == ([3], 3, 4)
    committed = e.commit()
    assert committed.handles.tolist() == [1, 1, 1, 1]
    assert committed.num_generated.tolist() == [2, 3, 4, 5]
    assert committed.index.tolist() == [0, 1, 2, 3]
    assert committed.rows.tolist() == [0, 0, 0, 0]
    assert e.step() == {1: (7, 1, "*")}
    e.drain()
    e.check_answers()


def test_positions_of_rejected_drafts_are_reused(engine):
    e = engine(num_blocks=8)
    e.add(1, prompt=3, max_tokens=9, max_drafts=4)
    e.step()
    e.draft(1, right=1, wrong=3)
    assert e.step() == {1: (3, 5, "*")}
    assert len(e.generated[1]) == 3
    assert e.memory.held[0] == 2
    assert e.memory.committed[0] == [*e.requests[1].prompt.tolist(), *e.generated[1][:2]]
    assert e.step() == {1: (5, 1, "*")}
    assert e.memory.held[0] == 2
    e.drain()
    e.check_answers()


def test_rows_with_and_without_drafts_share_a_step(engine):
    e = engine(num_blocks=16)
    for handle in (1, 2, 3):
        e.add(handle, prompt=3, max_tokens=6, max_drafts=handle - 1)
    e.step()
    e.draft(2, right=1)
    e.draft(3, right=0, wrong=2)
    plan = e.plan()
    assert e.ran(plan) == {1: (3, 1, "*"), 2: (3, 2, "*"), 3: (3, 3, "*")}
    assert plan.num_drafts.tolist() == [0, 1, 2]
    committed = e.commit()
    assert committed.handles.tolist() == [1, 2, 2, 3]
    assert committed.index.tolist() == [0, 1, 2, 3]
    e.drain()
    e.check_answers()


def test_drafts_are_for_one_step(engine):
    e = engine(num_blocks=8)
    e.add(1, prompt=3, max_tokens=9, max_drafts=2)
    e.step()
    e.draft(1, right=2)
    e.step()
    assert e.step() == {1: (6, 1, "*")}


def test_a_stop_id_among_accepted_drafts_ends_the_request(engine):
    e = engine(num_blocks=8)
    e.add(0, prompt=2, max_tokens=9, stop_ids=(28,), max_drafts=4)  # its third token
    e.add(1, prompt=2, max_tokens=9)
    e.step()
    e.draft(0, right=4)
    e.plan()
    committed = e.commit()
    assert committed.handles.tolist() == [0, 0, 1]
    assert committed.finished.tolist() == [Finish.NO, Finish.STOP, Finish.NO]
    assert committed.index.tolist() == [0, 1, 5]
    e.drain()
    e.check_answers()


def test_a_stop_id_below_min_tokens_is_skipped_among_accepted_drafts(engine):
    e = engine(num_blocks=8)
    e.add(0, prompt=2, max_tokens=9, stop_ids=(28, 42), min_tokens=4, max_drafts=4)
    e.step()
    e.draft(0, right=4)
    e.step()
    assert e.finished == {0: Finish.STOP}
    assert len(e.generated[0]) == 5
    e.check_answers()


def test_drafts_do_not_take_a_request_past_its_last_token(engine):
    e = engine(num_blocks=8)
    e.add(1, prompt=3, max_tokens=4, max_drafts=9)
    e.step()
    e.draft(1, right=9)
    assert e.step() == {1: (3, 3, "*")}  # the newest and 2 drafts, and a token sampled after them
    assert e.finished == {1: Finish.LENGTH}
    e.check_answers()


def test_a_request_with_one_token_left_runs_no_drafts(engine):
    e = engine(num_blocks=8)
    e.add(1, prompt=3, max_tokens=2, max_drafts=2)
    e.step()
    e.draft(1, right=2)
    assert e.step() == {1: (3, 1, "*")}
    e.check_answers()


def test_the_budget_cuts_drafts(engine):
    e = engine(num_blocks=16, max_num_batched_tokens=4)
    e.add(1, prompt=1, max_tokens=9, max_drafts=5)
    e.add(2, prompt=1, max_tokens=9, max_drafts=5)
    e.step()
    e.draft(1, right=1)
    e.draft(2, right=5)
    assert e.step() == {1: (1, 2, "*"), 2: (1, 2, "*")}
    assert e.step() == {1: (3, 1, "*"), 2: (3, 1, "*")}
    e.drain()
    e.check_answers()


def test_a_chunk_that_falls_short_keeps_drafts_for_later(engine):
    e = engine(num_blocks=16, max_num_batched_tokens=2)
    e.add(1, prompt=3, max_tokens=5, max_drafts=2)
    e.step()
    e.draft(1, right=1)
    assert e.step() == {1: (2, 2, "*")}
    assert len(e.generated[1]) == 2
    e.drain()
    e.check_answers()


def test_no_row_is_preempted_for_drafts(engine):
    e = engine(num_blocks=4)
    e.add(1, prompt=6, max_tokens=2)
    e.add(2, prompt=6, max_tokens=6, max_drafts=4)
    e.step()
    e.draft(2, right=4)
    assert e.step() == {1: (6, 1, "*"), 2: (6, 1, "*")}
    assert e.scheduler.load().preemptions == 0
    e.drain()
    e.check_answers()


def test_a_preempted_row_loses_its_drafts(engine):
    e = engine(num_blocks=8, max_num_batched_tokens=64)
    e.add(1, prompt=3, max_tokens=6, max_drafts=2)
    e.step()
    e.draft(1, right=2)
    e.scheduler.hold(1)
    e.scheduler.release(1)
    assert e.step() == {1: (0, 4, "*")}
    e.drain()
    e.check_answers()


@pytest.mark.parametrize("drafted", [False, True])
def test_a_request_that_may_have_drafts_is_not_planned_ahead_and_others_are(engine, drafted):
    e = engine(num_blocks=16)
    e.add(1, prompt=2, max_tokens=9, max_drafts=2)
    e.add(2, prompt=2, max_tokens=9)
    e.step()
    if drafted:
        e.draft(1, right=2)
    assert list(e.ran(e.plan())) == [1, 2]
    assert list(e.ran(e.plan())) == [2]
    with pytest.raises(ValueError, match=r"rows \[0\] have a token in flight"):
        e.scheduler.draft([0], [[5]])
    e.commit()
    assert list(e.ran(e.plan())) == [1, 2]
    e.drain(depth=1)
    e.check_answers()


def test_chunks_of_a_drafting_requests_prompt_overlap(engine):
    e = engine(num_blocks=8, max_num_batched_tokens=4)
    e.add(1, prompt=10, max_tokens=2, max_drafts=1)
    assert [e.ran(e.plan()) for _ in range(4)] == [{1: (0, 4)}, {1: (4, 4)}, {1: (8, 2, "*")}, {}]
    e.drain(depth=2)
    e.check_answers()


@pytest.mark.parametrize("host_blocks", [None, 8])
def test_a_victim_with_drafts_in_flight_keeps_what_was_accepted(engine, host_blocks):
    e = engine(num_blocks=5, host_blocks=host_blocks)
    e.add(1, prompt=7, max_tokens=9)
    e.add(2, prompt=6, max_tokens=9, max_drafts=4)
    e.step()
    e.draft(2, right=2, wrong=1)
    assert e.ran(e.plan()) == {1: (7, 1, "*"), 2: (6, 4, "*")}  # 2 and 3 blocks
    assert e.ran(e.plan()) == {}  # 1 needs a third
    e.commit()
    assert len(e.generated[2]) == 4
    assert e.scheduler.load().preemptions == 1
    if host_blocks:
        assert e.memory.swapped_out == 9
    e.drain(depth=1)
    e.check_answers()


def test_drafts_of_an_aborted_row_are_ignored(engine):
    e = engine(num_blocks=8)
    e.add(1, prompt=3, max_tokens=9, max_drafts=2)
    e.add(2, prompt=3, max_tokens=9, max_drafts=2)
    e.plan()
    committed = e.commit()
    e.scheduler.abort(1)
    e.scheduler.draft(committed.rows, np.zeros((2, 2), np.int32), np.array([2, 1]))
    assert e.ran(e.plan()) == {2: (3, 2, "*")}


def test_too_many_drafts_are_refused(engine):
    e = engine(num_blocks=8)
    e.add(1, prompt=3, max_tokens=9, max_drafts=2)
    e.step()
    with pytest.raises(ValueError, match=r"rows \[0\] are given more drafts"):
        e.scheduler.draft([0], [[1, 2, 3]])
    with pytest.raises(ValueError, match=r"\[1, k\], not \[2, 1\]"):
        e.scheduler.draft([0], [[1], [2]])
    with pytest.raises(ValueError, match="from 0 to 2"):
        e.scheduler.draft([0], [[1, 2]], [3])


@pytest.mark.parametrize("counts", [[4], [0], [1, 1]])
def test_impossible_counts_are_a_mismatch(engine, counts):
    e = engine(num_blocks=8)
    e.add(1, prompt=3, max_tokens=9, max_drafts=2)
    e.step()
    e.draft(1, right=2)
    plan = e.plan()
    with pytest.raises(StepMismatch):
        e.scheduler.commit(StepResult(plan.step, np.zeros(sum(counts), np.int32), np.array(counts)))
    e.drain()
    e.check_answers()


def test_counts_may_be_given_where_there_are_no_drafts(engine):
    e = engine(num_blocks=8)
    e.add(1, prompt=3, max_tokens=2)
    plan = e.plan()
    with pytest.raises(StepMismatch, match="have \\[2\\]"):
        e.scheduler.commit(StepResult(plan.step, np.array([5, 6]), np.array([2])))
    assert e.scheduler.commit(StepResult(plan.step, np.array([5]), np.array([1]))).tokens.tolist() == [5]
