"""A preemption of one's own is asked when a row goes and when it comes back."""

import numpy as np
import pytest

from batchsched import Fcfs, Limits, Recompute, Request, Scheduler, StepResult, TimeSlice


class Recording(Recompute):
    def __init__(self):
        self.calls = []

    def suspend(self, memory, row):
        self.calls.append(("suspend", row))
        super().suspend(memory, row)

    def resume(self, memory, row, prefix):
        self.calls.append(("resume", row))
        return super().resume(memory, row, prefix)


def test_it_is_asked_for_preempted_rows_only(engine):
    preemption = Recording()
    memory = engine(num_blocks=4).memory
    scheduler = Scheduler(Limits(4, 64, 64), memory, Fcfs(), preemption)
    for handle in (1, 2):
        scheduler.add(Request(handle, np.arange(7, dtype=np.int32), max_tokens=3))
    while scheduler.has_unfinished:
        plan = scheduler.plan()
        scheduler.commit(StepResult(plan.step, np.full(plan.samples.sum(), 9, np.int32)))
    assert preemption.calls == [("suspend", 1), ("resume", 0)]
    memory.check_empty()


def test_swapped_rows_come_back_with_all_they_had_computed(engine):
    e = engine(num_blocks=4, host_blocks=2)
    e.add(1, prompt=7, max_tokens=3)
    e.add(2, prompt=6, max_tokens=3)
    e.step()
    e.step()
    assert e.step() == {1: (8, 1, "*")}
    assert e.memory.swapped_out == 7
    plan = e.plan()
    (opened,) = plan.opened
    assert (opened.handle, opened.num_cached, opened.tokens.size, opened.resumed) == (2, 7, 8, True)
    assert e.ran(plan) == {2: (7, 1, "*")}
    e.commit()
    assert e.memory.swapped_in == 7
    e.check_answers()


def test_a_full_host_tier_means_recomputing(engine):
    e = engine(num_blocks=4, host_blocks=1)
    e.add(1, prompt=7, max_tokens=3)
    e.add(2, prompt=6, max_tokens=3)
    e.step()
    e.step()
    assert e.step() == {1: (8, 1, "*")}
    assert e.step() == {2: (0, 8, "*")}
    assert e.memory.swapped_out == 0
    e.check_answers()


def test_what_is_swapped_out_is_forgotten_with_its_request(engine):
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


def test_half_a_prompt_is_swapped_too(engine):
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
def test_turns_by_swapping(engine, depth):
    e = engine(num_blocks=7, max_num_seqs=3, host_blocks=6, policy=TimeSlice(3))
    for handle in range(9):
        e.add(handle, prompt=1 + handle % 4, max_tokens=8, stop_ids=(50,))
    e.drain(depth)
    assert e.memory.swapped_in == e.memory.swapped_out > 0
    e.check_answers()
