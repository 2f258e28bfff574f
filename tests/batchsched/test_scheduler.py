"""Steps written out one by one. In `ran`, (start, count) ran `count` tokens from `start`, and * sampled."""

import numpy as np
import pytest

from batchsched import DuplicateHandle, Finish, Limits, RequestRefused, Scheduler


def test_a_request_is_prefilled_then_decoded_one_token_a_step(engine):
    e = engine(num_blocks=8)
    e.add(7, prompt=5, max_tokens=3)
    assert e.step() == {7: (0, 5, "*")}
    assert e.step() == {7: (5, 1, "*")}
    assert e.step() == {7: (6, 1, "*")}
    assert not e.scheduler.has_unfinished
    assert e.step() == {}
    assert e.finished == {7: Finish.LENGTH}
    e.check_answers()


def test_max_tokens_1_is_one_step(engine):
    e = engine(num_blocks=8)
    e.add(7, prompt=5, max_tokens=1)
    assert e.step() == {7: (0, 5, "*")}
    assert len(e.generated[7]) == 1
    assert not e.scheduler.has_unfinished


def test_a_prompt_is_cut_to_the_budget_and_only_its_last_chunk_samples(engine):
    e = engine(num_blocks=8, max_num_batched_tokens=4)
    e.add(1, prompt=10, max_tokens=2)
    assert [e.step() for _ in range(4)] == [
        {1: (0, 4)},
        {1: (4, 4)},
        {1: (8, 2, "*")},
        {1: (10, 1, "*")},
    ]
    e.check_answers()


@pytest.mark.parametrize(
    ("budget", "max_num_seqs", "prefix_cache"),
    [
        (1, 1, False),
        (5, 4, True),
        (16, 4, False),
        (17, 1, True),
        (99, 1, False),
        (100, 4, True),
        (101, 4, False),
    ],
)
def test_any_budget_gives_the_same_answers(engine, budget, max_num_seqs, prefix_cache):
    e = engine(
        num_blocks=40,
        block_size=16,
        prefix_cache=prefix_cache,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_model_len=128,
    )
    for handle in range(3):
        e.add(handle, prompt=100, max_tokens=6)
    e.drain()
    e.check_answers()


def test_decodes_and_a_chunk_of_a_prompt_share_a_step(engine):
    e = engine(num_blocks=16, max_num_batched_tokens=6)
    e.add(1, prompt=3, max_tokens=9)
    e.step()
    e.add(2, prompt=8, max_tokens=2)
    assert e.step() == {1: (3, 1, "*"), 2: (0, 5)}
    assert e.step() == {1: (4, 1, "*"), 2: (5, 3, "*")}
    assert e.step() == {1: (5, 1, "*"), 2: (8, 1, "*")}


def test_a_budget_of_1_goes_to_the_first_request(engine):
    e = engine(num_blocks=16, max_num_batched_tokens=1)
    e.add(1, prompt=2, max_tokens=2)
    e.add(2, prompt=1, max_tokens=2)
    assert [e.step() for _ in range(6)] == [
        {1: (0, 1)},
        {1: (1, 1, "*")},
        {1: (2, 1, "*")},
        {2: (0, 1, "*")},
        {2: (1, 1, "*")},
        {},
    ]
    e.check_answers()


def test_a_budget_below_the_rows_that_decode_serves_the_first_of_them(engine):
    e = engine(num_blocks=16, max_num_batched_tokens=2)
    for handle in (1, 2, 3):
        e.add(handle, prompt=1, max_tokens=3)
    assert [e.step() for _ in range(5)] == [
        {1: (0, 1, "*"), 2: (0, 1, "*")},
        {1: (1, 1, "*"), 2: (1, 1, "*")},
        {1: (2, 1, "*"), 2: (2, 1, "*")},
        {3: (0, 1, "*")},
        {3: (1, 1, "*")},
    ]


def test_the_threshold_leaves_budget_for_those_behind_a_long_prompt(engine):
    e = engine(num_blocks=16, max_num_batched_tokens=8, long_prefill_token_threshold=5)
    e.add(1, prompt=12, max_tokens=2)
    e.add(2, prompt=2, max_tokens=3)
    e.add(3, prompt=4, max_tokens=2)
    assert [e.step() for _ in range(4)] == [
        {1: (0, 5), 2: (0, 2, "*"), 3: (0, 1)},
        {1: (5, 5), 2: (2, 1, "*"), 3: (1, 2)},
        {1: (10, 2, "*"), 2: (3, 1, "*"), 3: (3, 1, "*")},
        {1: (12, 1, "*"), 3: (4, 1, "*")},
    ]


def test_no_more_rows_than_max_num_seqs(engine):
    e = engine(num_blocks=16, max_num_seqs=2)
    for handle in (1, 2, 3):
        e.add(handle, prompt=2, max_tokens=handle)
    assert e.step() == {1: (0, 2, "*"), 2: (0, 2, "*")}
    assert e.step() == {2: (2, 1, "*"), 3: (0, 2, "*")}


def test_a_row_is_freed_before_it_is_admitted_again(engine):
    e = engine(num_blocks=16, max_num_seqs=1)
    e.add(1, prompt=2, max_tokens=1)
    e.add(2, prompt=3, max_tokens=1)
    first = e.plan()
    e.commit()
    second = e.plan()
    assert (first.freed.tolist(), [(o.row, o.handle) for o in first.admitted]) == ([], [(0, 1)])
    assert (second.freed.tolist(), [(o.row, o.handle) for o in second.admitted]) == ([0], [(0, 2)])


def test_a_handle_is_refused_while_it_lives_and_no_longer(engine):
    e = engine(num_blocks=8)
    e.add(1, prompt=2, max_tokens=1)
    with pytest.raises(DuplicateHandle, match="handle 1"):
        e.add(1, prompt=2, max_tokens=1)
    e.step()
    e.scheduler.add(e.requests[1])
    assert e.scheduler.abort(1)
    e.scheduler.add(e.requests[1])
    assert issubclass(DuplicateHandle, RequestRefused)


def test_a_stop_id_ends_the_request_and_is_committed(engine):
    e = engine(num_blocks=8)
    # handle 0 after 2 prompt tokens: 14, 21, 28, 35, ...
    e.add(0, prompt=2, max_tokens=8, stop_ids=(500, 28))
    e.drain()
    assert e.generated[0] == [14, 21, 28]
    assert e.finished == {0: Finish.STOP}


@pytest.mark.parametrize(
    ("min_tokens", "generated", "why"),
    [
        (0, [14], Finish.STOP),
        (1, [14], Finish.STOP),
        (2, [14, 21], Finish.STOP),
        (3, [14, 21, 28, 35], Finish.STOP),
        (4, [14, 21, 28, 35], Finish.STOP),
        (5, [14, 21, 28, 35, 42], Finish.LENGTH),
    ],
)
def test_stop_ids_below_min_tokens_do_not_count(engine, min_tokens, generated, why):
    e = engine(num_blocks=8)
    e.add(0, prompt=2, max_tokens=5, min_tokens=min_tokens, stop_ids=(14, 21, 35))
    e.drain()
    assert e.generated[0] == generated
    assert e.finished == {0: why}


def test_a_stop_id_as_the_last_token_allowed_is_a_stop(engine):
    e = engine(num_blocks=8)
    e.add(0, prompt=2, max_tokens=2, stop_ids=(21,))
    e.drain()
    assert e.finished == {0: Finish.STOP}


def test_committed_has_each_tokens_index_in_the_result(engine):
    e = engine(num_blocks=16)
    for handle in (0, 1, 2):
        e.add(handle, prompt=2, max_tokens=4)
    e.plan()
    e.scheduler.abort(1)
    committed = e.commit()
    assert committed.handles.tolist() == [0, 2]
    assert committed.index.tolist() == [0, 2]
    assert committed.tokens.tolist() == [14, 76]
    assert committed.finished.tolist() == [Finish.NO, Finish.NO]
    assert committed.num_generated.tolist() == [1, 1]
    assert [(column.dtype.name) for column in committed] == [
        "int64",
        "int32",
        "int8",
        "int32",
        "int32",
        "int32",
        "int32",
    ]


def test_plans_have_the_documented_types(engine):
    e = engine(num_blocks=16)
    e.add(0, prompt=2, max_tokens=2)
    e.add(1, prompt=2, max_tokens=1)
    for _ in range(2):
        plan = e.plan()
        e.commit()
        types = [
            column.dtype.name for column in (plan.rows, plan.starts, plan.counts, plan.samples, plan.freed)
        ]
        assert types == ["int32", "int32", "int32", "bool", "int32"]
        assert all(admitted.tokens.dtype == np.int32 for admitted in plan.admitted)
    assert plan.num_tokens == 1


def test_a_plan_without_rows_is_no_step(engine):
    e = engine(num_blocks=16, max_num_seqs=1)
    e.add(1, prompt=2, max_tokens=1)
    e.step()
    nothing = e.plan()
    assert (nothing.step, nothing.num_tokens, nothing.freed.size) == (0, 0, 0)
    assert e.scheduler.num_in_flight == 0
    e.add(2, prompt=2, max_tokens=1)
    plan = e.plan()
    assert (plan.step, plan.freed.tolist()) == (2, [0])  # the row freed meanwhile is told with a true step


class TestAbort:
    def test_of_an_unknown_handle(self, engine):
        assert engine(num_blocks=4).scheduler.abort(1) is False

    def test_of_a_waiting_request(self, engine):
        e = engine(num_blocks=16, max_num_seqs=1)
        for handle in (1, 2, 3):
            e.add(handle, prompt=2, max_tokens=2)
        e.step()
        assert e.scheduler.abort(2) is True
        assert e.scheduler.abort(2) is False
        e.step()
        assert list(e.step()) == [3]

    def test_between_steps_frees_the_row_at_once(self, engine):
        e = engine(num_blocks=4)
        e.add(1, prompt=8, max_tokens=8)
        e.add(2, prompt=8, max_tokens=8)
        e.step()
        assert e.scheduler.abort(1)
        assert e.memory.num_free == 2
        plan = e.plan()
        assert (plan.freed.tolist(), e.ran(plan)) == ([0], {2: (8, 1, "*")})

    def test_in_the_middle_of_a_prompt(self, engine):
        e = engine(num_blocks=4, max_num_batched_tokens=3)
        e.add(1, prompt=8, max_tokens=8)
        e.step()
        assert e.scheduler.abort(1)
        assert not e.scheduler.has_unfinished
        e.memory.check_empty()

    def test_in_flight_keeps_the_blocks_until_the_step_is_over(self, engine):
        e = engine(num_blocks=4)
        e.add(1, prompt=8, max_tokens=8)
        e.plan()
        assert e.scheduler.abort(1)
        assert not e.scheduler.has_unfinished
        assert e.memory.num_free == 2
        assert e.commit().handles.size == 0
        e.memory.check_empty()

    def test_a_handle_may_come_back_while_its_old_step_is_in_flight(self, engine):
        e = engine(num_blocks=8)
        for _ in range(200):
            e.add(1, prompt=8, max_tokens=8)
            e.plan()
            assert e.scheduler.abort(1)
            e.add(1, prompt=3, max_tokens=1)
            assert e.commit().handles.size == 0
            e.drain()
            assert len(e.generated[1]) == 1
            del e.finished[1]
        e.memory.check_empty()


class TestPause:
    def test_stops_planning_and_nothing_else(self, engine):
        e = engine(num_blocks=8)
        e.add(1, prompt=2, max_tokens=3)
        e.plan()
        e.scheduler.pause()
        assert e.scheduler.paused
        e.commit()
        e.add(2, prompt=2, max_tokens=1)
        assert e.step() == {}
        assert e.scheduler.has_unfinished
        e.scheduler.resume()
        assert not e.scheduler.paused
        assert e.step() == {1: (2, 1, "*"), 2: (0, 2, "*")}

    def test_requests_can_be_aborted_meanwhile(self, engine):
        e = engine(num_blocks=8)
        e.add(1, prompt=2, max_tokens=3)
        e.step()
        e.scheduler.pause()
        assert e.scheduler.abort(1)
        e.memory.check_empty()


def test_load(engine):
    e = engine(num_blocks=8, max_num_seqs=2)
    assert e.scheduler.load() == (0, 0, 0, 0.0, 0, 0)
    for handle, prompt in ((1, 4), (2, 7), (3, 5), (4, 6)):
        e.add(handle, prompt, max_tokens=2)
    assert e.scheduler.load() == (0, 4, 22, 0.0, 0, 0)
    e.step()
    load = e.scheduler.load()
    assert (load.running, load.waiting, load.waiting_tokens, load.kv_usage) == (2, 2, 11, 3 / 8)


def test_time_in_the_queue_is_measured_on_the_clock_given(engine):
    now = 100.0
    e = engine(num_blocks=8, max_num_seqs=1, clock=lambda: now)
    e.add(1, prompt=2, max_tokens=1)
    e.add(2, prompt=2, max_tokens=1, arrival=90.0)
    now = 103.0
    assert e.plan().admitted[0].waited == 13.0
    e.commit()
    now = 105.0
    assert e.plan().admitted[0].waited == 5.0


def test_the_policy_and_preemption_default_to_fcfs_and_recompute(engine):
    scheduler = Scheduler(Limits(1, 1, 2), engine(num_blocks=1).memory)
    assert type(scheduler.policy).__name__ == "Fcfs"
    assert type(scheduler.preemption).__name__ == "Recompute"
