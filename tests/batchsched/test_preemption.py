"""Preemption when memory runs short, and the preemption modes. Blocks hold 4 tokens."""

import numpy as np
import pytest

from batchsched import Fcfs, Finish, Limits, Recompute, Request, Scheduler, StepResult, TimeSlice


def test_a_lone_request_that_fills_memory_runs(engine):
    e = engine(num_blocks=3)
    e.add(1, prompt=5, max_tokens=8)  # 12 tokens run
    e.drain()
    e.check_answers()
    assert e.scheduler.load().preemptions == 0


def test_the_latest_is_preempted_and_resumes_with_all_its_tokens(engine):
    e = engine(num_blocks=4)
    e.add(1, prompt=7, max_tokens=6)  # 2 blocks, 3 from its third step on
    e.add(2, prompt=6, max_tokens=3)  # 2 blocks
    assert e.step() == {1: (0, 7, "*"), 2: (0, 6, "*")}
    assert e.step() == {1: (7, 1, "*"), 2: (6, 1, "*")}
    plan = e.plan()
    assert e.ran(plan) == {1: (8, 1, "*")}
    assert plan.freed.tolist() == [1]
    assert e.scheduler.load() == (1, 1, 8, 3 / 4, 1, 0)
    e.commit()
    assert e.step() == {1: (9, 1, "*")}
    assert e.step() == {1: (10, 1, "*")}
    assert e.step() == {1: (11, 1, "*")}
    plan = e.plan()
    (admitted,) = plan.admitted
    assert (admitted.handle, admitted.resumed, admitted.num_prompt, admitted.num_cached) == (2, True, 6, 0)
    assert admitted.tokens.tolist() == [*e.requests[2].prompt.tolist(), *e.generated[2]]
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
    assert e.plan().admitted[0].waited == 5.0


def test_a_resumed_request_starts_behind_its_cached_blocks(engine):
    e = engine(num_blocks=4, prefix_cache=True)
    e.add(1, prompt=7, max_tokens=3)
    e.add(2, prompt=7, max_tokens=3)
    e.step()
    e.step()  # both have 8 tokens computed, 9 known
    assert e.step() == {1: (8, 1, "*")}  # 2 is preempted, and its second block goes to 1
    plan = e.plan()
    (admitted,) = plan.admitted
    assert (admitted.handle, admitted.num_cached, admitted.tokens.size) == (2, 4, 9)
    assert e.ran(plan) == {2: (4, 5, "*")}
    assert e.commit().num_cached.tolist() == [0]  # what the prompt hit at first
    e.check_answers()


def test_use_cache_false_holds_after_preemption_too(engine):
    e = engine(num_blocks=4, prefix_cache=True)
    e.add(1, prompt=7, max_tokens=3)
    e.add(2, prompt=7, max_tokens=3, use_cache=False)
    e.step()
    e.step()
    assert e.step() == {1: (8, 1, "*")}
    assert e.step() == {2: (0, 9, "*")}


def test_a_preempted_request_goes_before_later_ones(engine):
    e = engine(num_blocks=4, max_num_seqs=2)
    e.add(1, prompt=7, max_tokens=3)
    e.add(2, prompt=6, max_tokens=3)
    e.add(3, prompt=1, max_tokens=1)
    e.step()
    e.step()
    assert e.step() == {1: (8, 1, "*")}
    assert list(e.step()) == [2, 3]


def test_nothing_is_admitted_in_a_step_that_preempted(engine):
    e = engine(num_blocks=6)
    e.add(1, prompt=8, max_tokens=5)
    e.add(2, prompt=15, max_tokens=2)
    e.step()  # all 6 blocks are held
    e.add(3, prompt=1, max_tokens=1)
    assert e.step() == {1: (8, 1, "*")}  # 2 gave 4 blocks back, of which 1 took one; 3 is not admitted
    assert e.step() == {1: (9, 1, "*")}  # nor is it ahead of 2, which needs 4
    e.drain()
    assert list(e.finished) == [1, 2, 3]
    e.check_answers()


def test_a_half_computed_prompt_can_be_preempted(engine):
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


def test_the_last_row_waits_rather_than_preempt_earlier_ones(engine):
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


def test_several_rows_are_preempted_if_it_takes_several(engine):
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


def test_many_requests_that_outgrow_memory_finish_in_order(engine):
    e = engine(num_blocks=12, block_size=16, max_num_seqs=8, max_model_len=128)
    for handle in range(6):
        e.add(handle, prompt=24, max_tokens=64)
    e.drain()
    assert e.scheduler.load().preemptions > 0
    assert list(e.finished) == [0, 1, 2, 3, 4, 5]
    e.check_answers()


class Recording(Recompute):
    def __init__(self):
        self.preempted = []

    def preempt(self, memory, row):
        self.preempted.append(row)
        super().preempt(memory, row)


def test_a_custom_mode_is_called_for_preempted_rows_only(engine):
    preemption = Recording()
    memory = engine(num_blocks=4).memory
    scheduler = Scheduler(Limits(4, 64, 64), memory, Fcfs(), preemption)
    for handle in (1, 2):
        scheduler.add(Request(handle, np.arange(7, dtype=np.int32), max_tokens=3))
    while scheduler.has_unfinished:
        plan = scheduler.plan()
        scheduler.commit(StepResult(plan.step, np.full(plan.samples.sum(), 9, np.int32)))
    assert preemption.preempted == [1]
    memory.check_empty()


def test_swapped_requests_resume_with_all_computed_tokens(engine):
    e = engine(num_blocks=4, host_blocks=2)
    e.add(1, prompt=7, max_tokens=3)
    e.add(2, prompt=6, max_tokens=3)
    e.step()
    e.step()
    assert e.step() == {1: (8, 1, "*")}
    assert e.memory.swapped_out == 7
    plan = e.plan()
    (admitted,) = plan.admitted
    assert (admitted.handle, admitted.num_cached, admitted.tokens.size, admitted.resumed) == (2, 7, 8, True)
    assert e.ran(plan) == {2: (7, 1, "*")}
    e.commit()
    assert e.memory.swapped_in == 7
    e.check_answers()


def test_with_a_full_host_tier_swap_recomputes(engine):
    e = engine(num_blocks=4, host_blocks=1)
    e.add(1, prompt=7, max_tokens=3)
    e.add(2, prompt=6, max_tokens=3)
    e.step()
    e.step()
    assert e.step() == {1: (8, 1, "*")}
    assert e.step() == {2: (0, 8, "*")}
    assert e.memory.swapped_out == 0
    e.check_answers()


def test_the_host_copy_of_an_aborted_request_is_discarded(engine):
    e = engine(num_blocks=4, host_blocks=2)
    e.add(1, prompt=7, max_tokens=3)
    e.add(2, prompt=6, max_tokens=3)
    e.step()
    e.step()
    e.step()
    assert e.memory.swapped_out == 7
    e.scheduler.abort(2)
    e.requests.pop(2)
    e.drain()
    e.check_answers()


def test_a_half_computed_prompt_is_swapped(engine):
    e = engine(num_blocks=5, max_num_batched_tokens=2, host_blocks=3)
    e.add(1, prompt=4, max_tokens=10)
    e.add(2, prompt=9, max_tokens=1)
    while not e.memory.swapped_out:
        e.step()
    assert e.memory.swapped_out == 8
    assert list(e.step()) == [2]
    assert e.memory.swapped_in == 8
    e.drain()
    e.check_answers()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_time_slices_by_swapping(engine, depth):
    e = engine(num_blocks=7, max_num_seqs=3, host_blocks=6, policy=TimeSlice(3))
    for handle in range(9):
        e.add(handle, prompt=1 + handle % 4, max_tokens=8, stop_ids=(50,))
    e.drain(depth)
    assert e.memory.swapped_in == e.memory.swapped_out > 0
    e.check_answers()
