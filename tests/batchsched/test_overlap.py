"""Steps planned before earlier ones are committed."""

import pytest

from batchsched import Finish


def test_a_decode_runs_the_token_that_is_still_being_sampled(engine):
    e = engine(num_blocks=8)
    e.add(1, prompt=3, max_tokens=4)
    assert e.ran(e.plan()) == {1: (0, 3, "*")}
    assert e.ran(e.plan()) == {1: (3, 1, "*")}
    e.commit()
    assert e.ran(e.plan()) == {1: (4, 1, "*")}
    assert e.scheduler.num_in_flight == 2
    assert e.emitted[1] == [e.runner.rows[0].tokens[3]]


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


def test_what_a_stopped_row_sampled_further_is_dropped(engine):
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
    assert e.plan().closed.tolist() == [0]


def test_what_a_stopped_row_ran_on_unknown_tokens_is_not_published(engine):
    e = engine(num_blocks=4)
    e.add(0, prompt=2, max_tokens=8, stop_ids=(14,))
    for _ in range(3):
        e.plan()
    e.commit()
    assert e.memory.published == {0: [0, 7]}
    for _ in range(2):
        e.commit()
        assert e.memory.published == {}
    e.memory.check_empty()


def test_an_ended_row_is_not_given_away_while_a_step_in_flight_has_it(engine):
    e = engine(num_blocks=8, max_num_seqs=1)
    e.add(0, prompt=2, max_tokens=8, stop_ids=(14,))
    e.add(1, prompt=2, max_tokens=1)
    e.plan()
    e.plan()
    e.commit()
    assert e.plan().rows.size == 0
    e.commit()
    plan = e.plan()
    assert (plan.closed.tolist(), plan.opened[0].row, plan.opened[0].handle) == ([0], 0, 1)


def test_a_row_whose_last_token_is_in_flight_is_left_in_peace(engine):
    e = engine(num_blocks=4)
    e.add(1, prompt=7, max_tokens=4)
    e.add(2, prompt=7, max_tokens=2)
    e.plan()
    e.plan()  # the last of 2; each has 2 blocks
    assert e.ran(e.plan()) == {}  # 1 needs a block, and 2's are coming
    e.commit()
    assert e.ran(e.plan()) == {}
    e.commit()
    assert e.finished == {2: Finish.LENGTH}
    assert e.ran(e.plan()) == {1: (8, 1, "*")}
    assert e.scheduler.load().preemptions == 0


def test_a_victim_leaves_when_its_last_step_is_committed(engine):
    e = engine(num_blocks=4)
    e.add(1, prompt=7, max_tokens=4)
    e.add(2, prompt=7, max_tokens=4)
    e.plan()
    e.plan()
    assert e.ran(e.plan()) == {}  # 1 needs a block: 2 is to leave, and has steps in flight
    assert e.scheduler.load().running == 2
    assert e.commit().handles.tolist() == [1, 2]
    assert e.ran(e.plan()) == {}
    assert e.commit().handles.tolist() == [1, 2]  # the victim's tokens count
    assert e.scheduler.load() == (1, 1, 9, 2 / 4, 1, 0)
    plan = e.plan()
    assert (plan.closed.tolist(), e.ran(plan)) == ([1], {1: (8, 1, "*")})
    e.drain(depth=1)
    e.check_answers()


def test_nobody_is_admitted_while_a_victim_has_yet_to_leave(engine):
    e = engine(num_blocks=6)
    e.memory.held["someone else"] = 2
    e.add(1, prompt=7, max_tokens=4)
    e.add(2, prompt=7, max_tokens=4)
    e.add(3, prompt=1, max_tokens=1)
    e.plan()
    e.plan()
    assert e.ran(e.plan()) == {}  # 2 is to leave
    e.memory.held["someone else"] = 0
    assert e.ran(e.plan()) == {1: (8, 1, "*")}  # a block is free for 3, but 2 was there before it
    e.commit()
    e.commit()
    del e.memory.held["someone else"]
    assert e.ran(e.plan()) == {1: (9, 1, "*"), 2: (0, 9, "*")}
    e.drain(depth=1)
    e.check_answers()


def test_a_victim_that_ends_meanwhile_is_not_preempted(engine):
    e = engine(num_blocks=4)
    e.add(1, prompt=7, max_tokens=4)
    e.add(0, prompt=7, max_tokens=4, stop_ids=(56,))  # its second token
    e.plan()
    e.plan()
    e.plan()
    e.drain(depth=1)
    assert e.scheduler.load().preemptions == 0
    e.check_answers()


def test_a_victim_can_be_aborted_before_it_has_left(engine):
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


def test_no_more_victims_than_their_blocks_are_needed(engine):
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


def test_rows_that_stay_in_their_block_go_on_past_one_that_waits(engine):
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


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize("budget", [1, 7, 64])
@pytest.mark.parametrize("prefix_cache", [False, True])
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
