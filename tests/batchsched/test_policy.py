"""Policies: order, victims, preemption for waiting requests, and no starvation."""

import numpy as np
import pytest

from batchsched import Candidates, Fcfs, Priority, Request, ShortestFirst, TimeSlice


class ByPriority(Fcfs):
    def rank(self, request, arrival_index, arrival):
        return request.priority


def candidates(*ranks_and_computed):
    ranks, computed = zip(*ranks_and_computed)
    return Candidates(np.array(ranks, np.float64), np.array(computed, np.int32))


def request(priority=0, prompt=1, max_tokens=1):
    return Request(1, np.zeros(prompt, np.int32), max_tokens, priority=priority)


def test_fcfs_ranks_by_arrival_time_whenever_it_was_added():
    assert Fcfs().rank(request(), arrival_index=4, arrival=50.0) < Fcfs().rank(
        request(-5), arrival_index=3, arrival=100.0
    )


def test_fcfs_preempts_the_last_row():
    assert Fcfs().victim(candidates((1, 5), (2, 5), (4, 50))) == 2


def test_of_equals_the_one_with_least_computed_is_preempted():
    assert ByPriority().victim(candidates((0, 1), (3, 8), (3, 5), (3, 9))) == 2


def test_of_equals_that_lose_the_same_the_last_is_preempted():
    assert ByPriority().victim(candidates((3, 5), (3, 8), (3, 5))) == 2


def test_priorities_less_than_half_a_level_apart_are_equals():
    assert Priority().victim(candidates((0.0, 1), (0.7, 9), (0.8, 2), (1.1, 7))) == 2
    assert Priority().victim(candidates((0.0, 1), (0.7, 9), (0.8, 7), (1.4, 8))) == 3


def test_priority_falls_by_a_level_in_every_ageing_time():
    policy = Priority(ageing=10)
    assert policy.rank(request(2), 1, arrival=0.0) < policy.rank(request(1), 2, arrival=10.5)
    assert policy.rank(request(2), 1, arrival=0.0) > policy.rank(request(1), 2, arrival=9.5)
    assert policy.rank(request(2), 1, arrival=0.0) < policy.rank(request(0), 2, arrival=20.5)


def test_shortest_first_ranks_by_work_less_ageing():
    policy = ShortestFirst(ageing=4)
    assert policy.rank(request(prompt=3, max_tokens=9), 1, 0.0) == policy.rank(request(prompt=7), 2, 1.0)


@pytest.mark.parametrize("ageing", [0, -1, float("inf"), float("nan")])
def test_ageing_must_be_positive_and_finite(ageing):
    with pytest.raises(ValueError, match="ageing"):
        Priority(ageing)
    with pytest.raises(ValueError, match="ageing"):
        ShortestFirst(ageing)


def test_a_quantum_is_a_token_at_least():
    with pytest.raises(ValueError, match="quantum is 0"):
        TimeSlice(0)


def test_the_queue_is_in_rank_order_and_equals_in_the_order_added(engine):
    e = engine(num_blocks=16, max_num_seqs=1, policy=ByPriority())
    for handle, priority in ((1, 2), (2, 0), (3, 1), (4, 0)):
        e.add(handle, prompt=2, max_tokens=1, priority=priority)
    e.drain()
    assert list(e.finished) == [2, 4, 3, 1]


def test_the_shortest_first(engine):
    e = engine(num_blocks=16, max_num_seqs=1, policy=ShortestFirst(), clock=lambda: 0.0)
    for handle, prompt, max_tokens in ((1, 9, 1), (2, 2, 3), (3, 4, 2)):
        e.add(handle, prompt, max_tokens)
    e.drain()
    assert list(e.finished) == [2, 3, 1]


def test_the_shortest_does_not_go_before_one_that_waited_long(engine):
    e = engine(num_blocks=16, max_num_seqs=1, policy=ShortestFirst(ageing=2))
    e.add(1, prompt=9, max_tokens=1, arrival=0.0)
    e.add(2, prompt=2, max_tokens=1, arrival=3.0)
    e.add(3, prompt=2, max_tokens=1, arrival=4.0)
    e.drain()
    assert list(e.finished) == [2, 1, 3]


def test_rows_run_in_rank_order_too(engine):
    e = engine(num_blocks=16, max_num_batched_tokens=4, policy=ByPriority())
    e.add(1, prompt=2, max_tokens=4, priority=1)
    e.step()
    e.add(2, prompt=6, max_tokens=2, priority=0)
    assert e.step() == {1: (2, 1, "*"), 2: (0, 3)}  # rows that run go before those that wait
    assert e.step() == {2: (3, 3, "*"), 1: (3, 1, "*")}
    assert list(e.step()) == [2, 1]


def test_nothing_is_admitted_in_a_step_short_of_memory_even_before_the_victim(engine):
    e = engine(num_blocks=6, policy=ByPriority())
    e.add(1, prompt=8, max_tokens=4, priority=0)
    e.add(2, prompt=15, max_tokens=2, priority=2)
    e.step()
    e.add(3, prompt=2, max_tokens=1, priority=1)
    assert list(e.step()) == [1]  # 2 gave 4 blocks back, and 3 needs 1
    assert list(e.step()) == [1, 3]
    e.drain()
    e.check_answers()


def test_the_last_in_rank_is_preempted(engine):
    e = engine(num_blocks=4, policy=ByPriority())
    e.add(1, prompt=7, max_tokens=3, priority=1)
    e.add(2, prompt=7, max_tokens=3, priority=0)
    e.step()
    e.step()
    assert e.step() == {2: (8, 1, "*")}
    e.drain()
    e.check_answers()


def test_the_first_row_is_never_preempted_though_it_loses_least(engine):
    e = engine(num_blocks=5, policy=ByPriority())
    e.add(1, prompt=4, max_tokens=3)
    e.add(2, prompt=11, max_tokens=4)
    assert list(e.step()) == [1, 2]
    assert e.step() == {1: (4, 1, "*"), 2: (11, 1, "*")}
    assert e.step() == {1: (5, 1, "*")}  # 2 needs a block, no row is behind it, so it waits
    assert e.scheduler.load().preemptions == 0
    e.drain()
    e.check_answers()


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


class TestPreemptionForWaiting:
    """Rows are preempted for the first waiting request."""

    def test_a_better_priority_preempts_a_row(self, engine, clock):
        e = engine(num_blocks=16, max_num_seqs=2, policy=Priority(), clock=clock)
        e.add(1, prompt=5, max_tokens=9, priority=1)
        e.add(2, prompt=3, max_tokens=9, priority=1)
        e.step()
        e.add(3, prompt=2, max_tokens=2)
        assert e.step() == {1: (5, 1, "*"), 3: (0, 2, "*")}  # 2 loses fewer tokens than 1 would
        assert e.scheduler.load().preemptions == 1
        assert list(e.step()) == [3, 1]
        assert e.step() == {1: (7, 1, "*"), 2: (0, 4, "*")}
        e.drain()
        e.check_answers()

    def test_as_many_rows_are_preempted_as_memory_takes(self, engine, clock):
        e = engine(num_blocks=9, policy=Priority(), clock=clock)
        for handle, prompt in ((1, 12), (2, 8), (3, 6), (4, 4)):
            e.add(handle, prompt, max_tokens=1 if handle == 4 else 4, priority=1)
        e.step()  # 3, 2, 2 blocks, and 1 that is free again
        assert e.memory.num_free == 2
        e.add(5, prompt=14, max_tokens=1)
        # It needs 4. The 2 that are free are for 1 and 2, so those of 3 are not enough: 2 is preempted too.
        assert e.step() == {1: (12, 1, "*"), 5: (0, 14, "*")}
        assert e.scheduler.load().preemptions == 2
        e.drain()
        e.check_answers()

    def test_no_row_is_preempted_if_all_would_not_be_enough(self, engine, clock):
        e = engine(num_blocks=6, policy=Priority(), clock=clock)
        e.add(1, prompt=11, max_tokens=2)
        e.add(2, prompt=5, max_tokens=4, priority=1)
        e.step()
        e.add(3, prompt=16, max_tokens=1, priority=0)
        assert list(e.step()) == [1, 2]
        assert e.scheduler.load().preemptions == 0

    def test_no_row_is_preempted_if_there_is_room(self, engine, clock):
        e = engine(num_blocks=6, policy=Priority(), clock=clock)
        e.add(1, prompt=2, max_tokens=4, priority=1)
        e.step()
        e.add(2, prompt=2, max_tokens=1)
        assert list(e.step()) == [1, 2]
        assert e.scheduler.load().preemptions == 0

    def test_no_row_is_preempted_while_a_draining_row_makes_room(self, engine, clock):
        e = engine(num_blocks=8, max_num_seqs=2, policy=Priority(), clock=clock)
        e.add(1, prompt=2, max_tokens=1, priority=1)
        e.add(2, prompt=2, max_tokens=4, priority=1)
        e.plan()
        e.add(3, prompt=2, max_tokens=1)
        assert e.ran(e.plan()) == {2: (2, 1, "*")}
        e.drain()
        assert e.scheduler.load().preemptions == 0
        e.check_answers()

    def test_equals_are_not_preempted(self, engine, clock):
        e = engine(num_blocks=8, max_num_seqs=1, policy=Priority(), clock=clock)
        e.add(1, prompt=2, max_tokens=4)
        e.step()
        e.add(2, prompt=2, max_tokens=1)
        assert list(e.step()) == [1]

    def test_a_row_half_a_level_ahead_by_ageing_is_safe(self, engine, clock):
        e = engine(num_blocks=8, max_num_seqs=1, policy=Priority(ageing=10), clock=clock)
        e.add(1, prompt=2, max_tokens=30, priority=1)
        e.step()
        clock.now = 5.1
        e.add(2, prompt=2, max_tokens=1)
        assert list(e.step()) == [1]
        clock.now = 14.0
        e.add(3, prompt=2, max_tokens=1, priority=-1)
        assert list(e.step()) == [3]

    def test_the_victim_is_freed_when_its_step_in_flight_is_committed(self, engine, clock):
        e = engine(num_blocks=16, max_num_seqs=2, policy=Priority(), clock=clock)
        e.add(1, prompt=5, max_tokens=9, priority=1)
        e.add(2, prompt=3, max_tokens=9, priority=1)
        e.plan()
        e.add(3, prompt=2, max_tokens=2)
        assert e.ran(e.plan()) == {1: (5, 1, "*")}
        e.commit()
        assert e.ran(e.plan()) == {1: (6, 1, "*"), 3: (0, 2, "*")}
        e.drain(depth=1)
        e.check_answers()

    def test_a_lone_row_is_preempted(self, engine, clock):
        e = engine(num_blocks=3, policy=Priority(), clock=clock)
        e.add(1, prompt=8, max_tokens=4, priority=1)
        e.step()
        e.add(2, prompt=8, max_tokens=1)
        assert list(e.step()) == [2]
        e.drain()
        e.check_answers()


class TestTimeSlice:
    def test_rows_alternate_after_each_quantum(self, engine):
        e = engine(num_blocks=16, max_num_seqs=1, policy=TimeSlice(2))
        e.add(1, prompt=2, max_tokens=5)
        e.add(2, prompt=3, max_tokens=3)
        e.add(3, prompt=1, max_tokens=1)
        ran = [e.step() for _ in range(9)]
        assert ran == [
            {1: (0, 2, "*")},
            {1: (2, 1, "*")},
            {2: (0, 3, "*")},
            {2: (3, 1, "*")},
            {3: (0, 1, "*")},
            {1: (0, 4, "*")},
            {1: (4, 1, "*")},
            {2: (0, 5, "*")},
            {1: (0, 6, "*")},
        ]
        e.check_answers()

    def test_rows_keep_their_place_while_no_request_waits(self, engine):
        e = engine(num_blocks=16, policy=TimeSlice(2))
        e.add(1, prompt=2, max_tokens=9)
        e.add(2, prompt=2, max_tokens=9)
        for _ in range(5):
            assert list(e.step()) == [1, 2]
        e.drain()
        assert e.scheduler.load().preemptions == 0

    def test_a_request_that_arrives_after_the_quantum_is_admitted_at_once(self, engine):
        e = engine(num_blocks=16, max_num_seqs=1, policy=TimeSlice(2))
        e.add(1, prompt=2, max_tokens=9)
        for _ in range(5):
            e.step()
        e.add(2, prompt=2, max_tokens=1)
        assert list(e.step()) == [2]

    def test_no_row_is_preempted_for_a_request_there_is_room_for(self, engine):
        e = engine(num_blocks=16, max_num_seqs=2, policy=TimeSlice(1))
        e.add(1, prompt=2, max_tokens=9)
        e.step()
        e.add(2, prompt=2, max_tokens=9)
        assert list(e.step()) == [1, 2]
        assert e.scheduler.load().preemptions == 0

    def test_recomputed_tokens_do_not_count_towards_the_quantum(self, engine):
        e = engine(num_blocks=16, max_num_seqs=1, max_num_batched_tokens=2, policy=TimeSlice(2))
        e.add(1, prompt=8, max_tokens=4)
        e.add(2, prompt=8, max_tokens=4)
        e.drain()
        assert e.scheduler.load().preemptions == 2
        e.check_answers()


class TestStarvation:
    """Requests that a policy prefers keep coming, more than there is room for; the others still end."""

    bound = 250
    """Steps, a second each. After 12 seconds the worst of the first requests outranks whatever comes, and
    those before it need some 10 steps each, three at a time; a round of time slices is as long as the queue
    then."""

    def last_of_the_first(self, engine, policy, seed, host_blocks=None, depth=0):
        """The step in which the last of the first 12 requests ends, None if that takes more than `bound`."""
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
        for step in range(self.bound):
            now = float(step)
            e.add(12 + step, prompt=int(rng.integers(1, 4)), max_tokens=int(rng.integers(1, 5)))
            while len(e.results) <= depth and e.plan().rows.size:
                pass
            e.commit()
            if all(handle in e.finished for handle in range(12)):
                return step
        return None

    @pytest.mark.parametrize(("depth", "host_blocks"), [(0, None), (0, 6), (1, None), (1, 6)])
    @pytest.mark.parametrize(
        "policy",
        [Fcfs(), Priority(ageing=4), TimeSlice(4), ShortestFirst(ageing=1)],
        ids=lambda p: type(p).__name__,
    )
    def test_no_request_starves(self, engine, policy, depth, host_blocks):
        assert self.last_of_the_first(engine, policy, 2 * depth, host_blocks, depth) is not None

    def test_without_ageing_some_starve(self, engine):
        policy = ByPriority()
        policy.margin = 0.0
        assert self.last_of_the_first(engine, policy, seed=0) is None
