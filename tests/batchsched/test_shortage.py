"""Memory runs short: who waits, who is preempted, and how they come back. Blocks hold 4 tokens."""

from batchsched import Finish


def test_a_lone_request_that_fills_memory_runs(engine):
    e = engine(num_blocks=3)
    e.add(1, prompt=5, max_tokens=8)  # 12 tokens run
    e.drain()
    e.check_answers()
    assert e.scheduler.load().preemptions == 0


def test_the_latest_gives_way_and_comes_back_with_all_its_tokens(engine):
    e = engine(num_blocks=4)
    e.add(1, prompt=7, max_tokens=6)  # 2 blocks, 3 from its third step on
    e.add(2, prompt=6, max_tokens=3)  # 2 blocks
    assert e.step() == {1: (0, 7, "*"), 2: (0, 6, "*")}
    assert e.step() == {1: (7, 1, "*"), 2: (6, 1, "*")}
    plan = e.plan()
    assert e.ran(plan) == {1: (8, 1, "*")}
    assert plan.closed.tolist() == [1]
    assert e.scheduler.load() == (1, 1, 8, 3 / 4, 1, 0)
    e.commit()
    assert e.step() == {1: (9, 1, "*")}
    assert e.step() == {1: (10, 1, "*")}
    assert e.step() == {1: (11, 1, "*")}
    plan = e.plan()
    (opened,) = plan.opened
    assert (opened.handle, opened.resumed, opened.num_prompt, opened.num_cached) == (2, True, 6, 0)
    assert opened.tokens.tolist() == [*e.requests[2].tokens.tolist(), *e.emitted[2]]
    assert e.ran(plan) == {2: (0, 8, "*")}
    e.commit()
    e.check_answers()


def test_time_in_the_queue_counts_from_the_preemption(engine):
    now = 0.0
    e = engine(num_blocks=4, clock=lambda: now)
    e.add(1, prompt=7, max_tokens=3)
    e.add(2, prompt=6, max_tokens=3)
    e.step()
    e.step()
    now = 20.0
    assert e.step() == {1: (8, 1, "*")}
    now = 25.0
    assert e.plan().opened[0].waited == 5.0


def test_a_resumed_request_starts_behind_its_cached_blocks(engine):
    e = engine(num_blocks=4, prefix_cache=True)
    e.add(1, prompt=7, max_tokens=3)
    e.add(2, prompt=7, max_tokens=3)
    e.step()
    e.step()  # both have 8 tokens computed, 9 known
    assert e.step() == {1: (8, 1, "*")}  # and 2 gives way; its second block goes to 1
    plan = e.plan()
    (opened,) = plan.opened
    assert (opened.handle, opened.num_cached, opened.tokens.size) == (2, 4, 9)
    assert e.ran(plan) == {2: (4, 5, "*")}
    assert e.commit().num_cached.tolist() == [0]  # what the prompt hit at first
    e.check_answers()


def test_a_request_that_wants_every_position_computed_gets_it_after_preemption_too(engine):
    e = engine(num_blocks=4, prefix_cache=True)
    e.add(1, prompt=7, max_tokens=3)
    e.add(2, prompt=7, max_tokens=3, use_cache=False)
    e.step()
    e.step()
    assert e.step() == {1: (8, 1, "*")}
    assert e.step() == {2: (0, 9, "*")}


def test_the_preempted_goes_before_those_that_wait(engine):
    e = engine(num_blocks=4, max_num_seqs=2)
    e.add(1, prompt=7, max_tokens=3)
    e.add(2, prompt=6, max_tokens=3)
    e.add(3, prompt=1, max_tokens=1)
    e.step()
    e.step()
    assert e.step() == {1: (8, 1, "*")}
    assert list(e.step()) == [2, 3]


def test_nobody_is_admitted_in_a_step_that_preempted(engine):
    e = engine(num_blocks=6)
    e.add(1, prompt=8, max_tokens=5)
    e.add(2, prompt=15, max_tokens=2)
    e.step()  # all 6 blocks are held
    e.add(3, prompt=1, max_tokens=1)
    assert e.step() == {1: (8, 1, "*")}  # 2 gave 4 blocks back, of which 1 took one; 3 is not let in
    assert e.step() == {1: (9, 1, "*")}  # nor is it ahead of 2, which needs 4
    e.drain()
    assert list(e.finished) == [1, 2, 3]
    e.check_answers()


def test_headroom_is_left_for_the_rows_that_run(engine):
    e = engine(num_blocks=6, headroom=0.5)
    for handle in (1, 2, 3):
        e.add(handle, prompt=7, max_tokens=2)
    assert list(e.step()) == [1, 2]  # 3 would take the last 2 blocks, and 1 is to be left for two rows
    assert list(e.step()) == [1, 2]
    assert list(e.step()) == [3]


def test_headroom_is_rounded_down(engine):
    e = engine(num_blocks=7, headroom=0.5)
    for handle in (1, 2, 3):
        e.add(handle, prompt=7, max_tokens=2)
    assert list(e.step()) == [1, 2, 3]
    e.add(4, prompt=4, max_tokens=1)
    assert list(e.step()) == [1, 2, 3]  # 4 would take the last block; half a block for each of three is 1


def test_headroom_never_keeps_out_a_request_that_would_run_alone(engine):
    e = engine(num_blocks=3, headroom=100)
    e.add(1, prompt=9, max_tokens=4)
    e.add(2, prompt=9, max_tokens=4)
    e.drain()
    e.check_answers()


def test_a_prompt_that_is_half_done_can_be_preempted(engine):
    e = engine(num_blocks=5, max_num_batched_tokens=2)
    e.add(1, prompt=4, max_tokens=10)
    e.add(2, prompt=9, max_tokens=1)
    assert [e.step() for _ in range(3)] == [{1: (0, 2)}, {1: (2, 2, "*")}, {1: (4, 1, "*"), 2: (0, 1)}]
    for _ in range(6):
        e.step()
    assert e.step() == {1: (11, 1, "*"), 2: (7, 1)}  # 3 and 2 blocks, and both are at the end of their last
    assert e.step() == {1: (12, 1, "*")}
    assert e.scheduler.load().preemptions == 1
    assert e.step() == {2: (0, 2)}
    e.drain()
    e.check_answers()


def test_the_last_in_line_waits_rather_than_take_from_those_ahead(engine):
    e = engine(num_blocks=4)
    e.add(1, prompt=5, max_tokens=4)  # 2 blocks to the end
    e.add(2, prompt=7, max_tokens=4)  # 3 from its third step on
    e.step()
    assert e.step() == {1: (5, 1, "*"), 2: (7, 1, "*")}
    assert e.step() == {1: (6, 1, "*")}
    assert e.step() == {1: (7, 1, "*")}
    assert e.finished == {1: Finish.LENGTH}
    assert e.step() == {2: (8, 1, "*")}
    assert e.scheduler.load().preemptions == 0


def test_as_many_give_way_as_it_takes(engine):
    e = engine(num_blocks=7, max_num_batched_tokens=16, long_prefill_token_threshold=8)
    e.add(1, prompt=16, max_tokens=1)
    e.add(2, prompt=3, max_tokens=2)
    e.add(3, prompt=3, max_tokens=2)
    assert e.step() == {1: (0, 8), 2: (0, 3, "*"), 3: (0, 3, "*")}
    e.memory.held["someone else"] = 3  # now none is free, and 1 needs 2 for its second chunk
    assert e.step() == {1: (8, 8, "*")}
    assert e.scheduler.load().preemptions == 2
    assert e.step() == {2: (0, 4, "*"), 3: (0, 4, "*")}
    del e.memory.held["someone else"]
    e.check_answers()


def test_a_preempted_request_can_be_aborted(engine):
    e = engine(num_blocks=4)
    e.add(1, prompt=7, max_tokens=3)
    e.add(2, prompt=7, max_tokens=3)
    for _ in range(3):
        e.step()
    assert e.scheduler.load().waiting == 1
    assert e.scheduler.abort(2)
    e.drain()
    assert e.finished == {1: Finish.LENGTH}
    e.memory.check_empty()


def test_many_that_grow_past_memory_all_finish_in_order(engine):
    e = engine(num_blocks=12, block_size=16, max_num_seqs=8, max_model_len=128)
    for handle in range(6):
        e.add(handle, prompt=24, max_tokens=64)
    e.drain()
    assert e.scheduler.load().preemptions > 0
    assert list(e.finished) == [0, 1, 2, 3, 4, 5]
    e.check_answers()
