"""Steps planned before earlier ones are committed, and results that match no step."""

import numpy as np
import pytest

from batchsched import Finish, StepMismatch, StepResult


def test_a_decode_runs_the_token_that_is_still_being_sampled(engine):
    e = engine(num_blocks=8)
    e.add(1, prompt=3, max_tokens=4)
    assert e.ran(e.plan()) == {1: (0, 3, "*")}
    assert e.ran(e.plan()) == {1: (3, 1, "*")}
    e.commit()
    assert e.ran(e.plan()) == {1: (4, 1, "*")}
    assert e.scheduler.num_in_flight == 2
    assert e.generated[1] == [e.runner.rows[0].tokens[3]]


def test_nothing_is_planned_past_the_target(engine):
    e = engine(num_blocks=8)
    e.add(1, prompt=3, max_tokens=2)
    assert e.ran(e.plan()) == {1: (0, 3, "*")}
    assert e.ran(e.plan()) == {1: (3, 1, "*")}
    assert e.ran(e.plan()) == {}
    assert e.scheduler.num_in_flight == 2
    e.drain()
    e.check_answers()


def test_chunks_of_a_prompt_overlap(engine):
    e = engine(num_blocks=8, max_num_batched_tokens=4)
    e.add(1, prompt=10, max_tokens=2)
    assert [e.ran(e.plan()) for _ in range(4)] == [
        {1: (0, 4)},
        {1: (4, 4)},
        {1: (8, 2, "*")},
        {1: (10, 1, "*")},
    ]
    e.drain()
    e.check_answers()


def test_tokens_sampled_after_a_stop_id_are_dropped(engine):
    e = engine(num_blocks=4)
    e.add(0, prompt=2, max_tokens=8, stop_ids=(14,))
    e.add(1, prompt=2, max_tokens=3)
    e.plan()
    e.plan()
    assert e.commit().handles.tolist() == [0, 1]
    assert e.finished == {0: Finish.STOP}
    assert 0 in e.memory.held  # step 2 still writes there
    committed = e.commit()
    assert (committed.handles.tolist(), committed.index.tolist()) == ([1], [1])
    assert 0 not in e.memory.held
    assert e.plan().freed.tolist() == [0]


def test_positions_computed_after_a_stop_id_are_not_committed_to_memory(engine):
    e = engine(num_blocks=4)
    e.add(0, prompt=2, max_tokens=8, stop_ids=(14,))
    for _ in range(3):
        e.plan()
    e.commit()
    assert e.memory.committed == {0: [0, 7]}
    for _ in range(2):
        e.commit()
        assert e.memory.committed == {}
    e.memory.check_empty()


def test_an_ended_row_is_not_reused_while_a_step_in_flight_has_it(engine):
    e = engine(num_blocks=8, max_num_seqs=1)
    e.add(0, prompt=2, max_tokens=8, stop_ids=(14,))
    e.add(1, prompt=2, max_tokens=1)
    e.plan()
    e.plan()
    e.commit()
    assert e.plan().rows.size == 0
    e.commit()
    plan = e.plan()
    assert (plan.freed.tolist(), plan.admitted[0].row, plan.admitted[0].handle) == ([0], 0, 1)


def test_no_row_is_preempted_while_draining_rows_free_enough(engine):
    e = engine(num_blocks=4)
    e.add(1, prompt=7, max_tokens=4)
    e.add(2, prompt=7, max_tokens=2)
    e.plan()
    e.plan()  # the last of 2; each has 2 blocks
    assert e.ran(e.plan()) == {}  # 1 needs a block, and those of 2 are about to be freed
    e.commit()
    assert e.ran(e.plan()) == {}
    e.commit()
    assert e.finished == {2: Finish.LENGTH}
    assert e.ran(e.plan()) == {1: (8, 1, "*")}
    assert e.scheduler.load().preemptions == 0


def test_a_preempted_row_is_freed_when_its_last_step_is_committed(engine):
    e = engine(num_blocks=4)
    e.add(1, prompt=7, max_tokens=4)
    e.add(2, prompt=7, max_tokens=4)
    e.plan()
    e.plan()
    assert e.ran(e.plan()) == {}  # 1 needs a block: 2 is preempted, and has steps in flight
    assert e.scheduler.load().running == 2
    assert e.commit().handles.tolist() == [1, 2]
    assert e.ran(e.plan()) == {}
    assert e.commit().handles.tolist() == [1, 2]  # the victim's tokens count
    assert e.scheduler.load() == (1, 1, 9, 2 / 4, 1, 0)
    plan = e.plan()
    assert (plan.freed.tolist(), e.ran(plan)) == ([1], {1: (8, 1, "*")})
    e.drain(depth=1)
    e.check_answers()


def test_nothing_is_admitted_while_a_preempted_row_is_draining(engine):
    e = engine(num_blocks=6)
    e.memory.held["someone else"] = 2
    e.add(1, prompt=7, max_tokens=4)
    e.add(2, prompt=7, max_tokens=4)
    e.add(3, prompt=1, max_tokens=1)
    e.plan()
    e.plan()
    assert e.ran(e.plan()) == {}  # 2 is preempted
    e.memory.held["someone else"] = 0
    assert e.ran(e.plan()) == {1: (8, 1, "*")}  # a block is free for 3, but 2 was there before it
    e.commit()
    e.commit()
    del e.memory.held["someone else"]
    assert e.ran(e.plan()) == {1: (9, 1, "*"), 2: (0, 9, "*")}
    e.drain(depth=1)
    e.check_answers()


def test_a_victim_that_ends_while_draining_is_not_preempted(engine):
    e = engine(num_blocks=4)
    e.add(1, prompt=7, max_tokens=4)
    e.add(0, prompt=7, max_tokens=4, stop_ids=(56,))  # its second token
    e.plan()
    e.plan()
    e.plan()
    e.drain(depth=1)
    assert e.scheduler.load().preemptions == 0
    e.check_answers()


def test_a_victim_can_be_aborted_while_draining(engine):
    e = engine(num_blocks=4)
    e.add(1, prompt=7, max_tokens=4)
    e.add(2, prompt=7, max_tokens=4)
    e.plan()
    e.plan()
    e.plan()
    assert e.scheduler.abort(2)
    e.drain(depth=1)
    assert e.scheduler.load().preemptions == 0
    assert e.finished == {1: Finish.LENGTH}
    e.memory.check_empty()


def test_no_more_rows_are_preempted_than_their_blocks_are_needed(engine):
    e = engine(num_blocks=6)
    for handle in (1, 2, 3):
        e.add(handle, prompt=7, max_tokens=4)
    e.plan()
    e.plan()
    assert e.ran(e.plan()) == {}  # 1 and 2 need a block each: those of 3 do for both
    e.commit()
    e.commit()
    assert e.ran(e.plan()) == {1: (8, 1, "*"), 2: (8, 1, "*")}
    assert e.scheduler.load().preemptions == 1


def test_rows_inside_their_last_block_run_past_one_that_waits_for_a_block(engine):
    e = engine(num_blocks=5)
    e.add(0, prompt=2, max_tokens=8, stop_ids=(14,))
    e.add(2, prompt=7, max_tokens=3)
    e.add(3, prompt=5, max_tokens=4)
    e.plan()
    e.plan()
    e.commit()
    assert e.finished == {0: Finish.STOP}
    assert e.ran(e.plan()) == {3: (6, 1, "*")}  # 2 needs the block that 0 still has
    e.commit()
    assert e.ran(e.plan()) == {2: (8, 1, "*"), 3: (7, 1, "*")}
    e.drain(depth=1)
    e.check_answers()


@pytest.mark.parametrize(
    ("depth", "budget", "prefix_cache"),
    [
        (0, 1, True),
        (0, 7, False),
        (0, 64, True),
        (1, 1, False),
        (1, 7, True),
        (1, 64, False),
        (2, 1, True),
        (2, 7, False),
        (2, 64, True),
        (5, 1, False),
        (5, 7, True),
        (5, 64, False),
    ],
)
def test_any_depth_gives_the_same_answers(engine, depth, budget, prefix_cache):
    e = engine(
        num_blocks=9,
        max_num_seqs=5,
        max_num_batched_tokens=budget,
        max_model_len=33,
        prefix_cache=prefix_cache,
    )
    for handle in range(9):
        stop_ids = tuple((handle * 31 + position * 7) % 97 for position in range(handle, 33, handle + 5))
        e.add(handle, prompt=1 + handle * 3 % 10, max_tokens=25, stop_ids=stop_ids, min_tokens=handle)
    e.drain(depth)
    e.check_answers()
    if budget == 64:
        assert e.scheduler.load().preemptions > 0


class TestResults:
    def test_without_a_step_in_flight(self, engine):
        with pytest.raises(StepMismatch, match="no step is in flight"):
            engine(num_blocks=8).scheduler.commit(StepResult(1, np.zeros(0, np.int32)))

    def test_out_of_order(self, engine):
        e = engine(num_blocks=8)
        e.add(1, prompt=2, max_tokens=3)
        e.plan()
        e.plan()
        with pytest.raises(StepMismatch, match="step 2 has a result, and step 1 comes first"):
            e.scheduler.commit(e.results[1])
        e.drain()
        e.check_answers()

    def test_of_the_wrong_size(self, engine):
        e = engine(num_blocks=8)
        e.add(1, prompt=2, max_tokens=3)
        plan = e.plan()
        with pytest.raises(StepMismatch, match="samples 1 tokens"):
            e.scheduler.commit(StepResult(plan.step, np.zeros(2, np.int32)))
        e.drain()
        e.check_answers()
