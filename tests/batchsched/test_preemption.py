"""A preemption of one's own is asked when a row goes and when it comes back."""

import numpy as np

from batchsched import Fcfs, Limits, Recompute, Request, Scheduler, StepResult


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
