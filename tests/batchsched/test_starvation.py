"""Requests that a policy prefers keep coming, more than there is room for; the others end all the same."""

import numpy as np
import pytest

from batchsched import Fcfs, Priority, ShortestFirst, TimeSlice

POLICIES = {
    "fcfs": Fcfs(),
    "priority": Priority(ageing=4),
    "timeslice": TimeSlice(4),
    "shortest": ShortestFirst(ageing=1),
}
BOUND = 250
"""Steps, a second each. After 12 seconds the worst of the first requests outranks whatever comes, and those
before it need some 10 steps each, three at a time; a turn of the time slices is as long as the queue then."""


class ByPriority(Fcfs):
    margin = 0.0

    def rank(self, request, turn, arrival):
        return request.priority


def last_of_the_first(engine, policy, seed, host_blocks=None, depth=0):
    """The step in which the last of the first 12 requests ends, or None if that takes more than BOUND."""
    now = 0.0
    e = engine(
        num_blocks=10,
        max_num_seqs=3,
        max_num_batched_tokens=12,
        policy=policy,
        host_blocks=host_blocks,
        clock=lambda: now,
    )
    rng = np.random.default_rng(seed)
    for handle in range(12):
        e.add(handle, int(rng.integers(6, 12)), int(rng.integers(6, 12)), priority=int(rng.integers(4)))
    for step in range(BOUND):
        now = float(step)
        e.add(12 + step, prompt=int(rng.integers(1, 4)), max_tokens=int(rng.integers(1, 5)))
        while len(e.results) <= depth and e.plan().rows.size:
            pass
        e.commit()
        if all(handle in e.finished for handle in range(12)):
            return step
    return None


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("host_blocks", [None, 6])
@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_starves(engine, policy, host_blocks, depth, seed):
    assert last_of_the_first(engine, POLICIES[policy], seed, host_blocks, depth) is not None


def test_it_takes_ageing(engine):
    assert last_of_the_first(engine, ByPriority(), seed=0) is None
