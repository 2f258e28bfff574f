"""Policies order and choose; the scheduler obeys."""

import numpy as np
import pytest

from batchsched import Fcfs, Line, Priority, Request, ShortestFirst, TimeSlice


class ByPriority(Fcfs):
    def rank(self, request, turn, arrival):
        return request.priority


def line(*ranks_and_lost):
    ranks, lost = zip(*ranks_and_lost)
    return Line(np.array(ranks, np.float64), np.array(lost, np.int32))


def request(priority=0, prompt=1, max_tokens=1):
    return Request(1, np.zeros(prompt, np.int32), max_tokens, priority=priority)


def test_fcfs_ranks_by_turn_whatever_the_arrival():
    assert Fcfs().rank(request(-5), turn=3, arrival=100.0) < Fcfs().rank(request(), turn=4, arrival=50.0)


def test_fcfs_preempts_the_last_in_line():
    assert Fcfs().victim(line((1, 5), (2, 5), (4, 50))) == 2


def test_of_equals_the_one_with_least_computed_gives_way():
    assert ByPriority().victim(line((0, 1), (3, 8), (3, 5), (3, 9))) == 2


def test_of_equals_that_lose_the_same_the_last_gives_way():
    assert ByPriority().victim(line((3, 5), (3, 8), (3, 5))) == 2


def test_priorities_less_than_half_a_level_apart_are_equals():
    assert Priority().victim(line((0.0, 1), (0.7, 9), (0.8, 2), (1.1, 7))) == 2
    assert Priority().victim(line((0.0, 1), (0.7, 9), (0.8, 7), (1.4, 8))) == 3


def test_priority_falls_by_a_level_in_every_ageing_time():
    policy = Priority(ageing=10)
    assert policy.rank(request(2), 1, arrival=0.0) < policy.rank(request(1), 2, arrival=10.5)
    assert policy.rank(request(2), 1, arrival=0.0) > policy.rank(request(1), 2, arrival=9.5)
    assert policy.rank(request(2), 1, arrival=0.0) < policy.rank(request(0), 2, arrival=20.5)


def test_the_shortest_is_the_one_with_least_to_do_and_waiting_counts_against_it():
    policy = ShortestFirst(ageing=4)
    assert policy.rank(request(prompt=3, max_tokens=9), 1, 0.0) == policy.rank(request(prompt=7), 2, 1.0)


@pytest.mark.parametrize("ageing", [0, -1, float("inf"), float("nan")])
def test_nobody_may_starve(ageing):
    with pytest.raises(ValueError, match="ageing"):
        Priority(ageing)
    with pytest.raises(ValueError, match="ageing"):
        ShortestFirst(ageing)


def test_a_turn_is_a_token_at_least():
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


def test_nobody_is_admitted_in_a_step_short_of_memory_even_ahead_of_the_victim(engine):
    e = engine(num_blocks=6, policy=ByPriority())
    e.add(1, prompt=8, max_tokens=4, priority=0)
    e.add(2, prompt=15, max_tokens=2, priority=2)
    e.step()
    e.add(3, prompt=2, max_tokens=1, priority=1)
    assert list(e.step()) == [1]  # 2 gave 4 blocks back, and 3 needs 1
    assert list(e.step()) == [1, 3]
    e.drain()
    e.check_answers()


def test_the_last_in_rank_gives_way(engine):
    e = engine(num_blocks=4, policy=ByPriority())
    e.add(1, prompt=7, max_tokens=3, priority=1)
    e.add(2, prompt=7, max_tokens=3, priority=0)
    e.step()
    e.step()
    assert e.step() == {2: (8, 1, "*")}
    e.drain()
    e.check_answers()


def test_the_first_in_line_never_gives_way_though_it_is_an_equal_that_loses_least(engine):
    e = engine(num_blocks=5, policy=ByPriority())
    e.add(1, prompt=4, max_tokens=3)
    e.add(2, prompt=11, max_tokens=4)
    assert list(e.step()) == [1, 2]
    assert e.step() == {1: (4, 1, "*"), 2: (11, 1, "*")}
    assert e.step() == {1: (5, 1, "*")}  # 2 needs a block, has nobody behind it, and waits
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


class TestMakingWay:
    """A waiting request takes rows' places."""

    def test_the_better_priority_takes_a_row(self, engine, clock):
        e = engine(num_blocks=16, max_num_seqs=2, policy=Priority(), clock=clock)
        e.add(1, prompt=5, max_tokens=9, priority=1)
        e.add(2, prompt=3, max_tokens=9, priority=1)
        e.step()
        e.add(3, prompt=2, max_tokens=2)
        assert e.step() == {1: (5, 1, "*"), 3: (0, 2, "*")}  # 2 lost fewer tokens than 1 would
        assert e.scheduler.load().preemptions == 1
        assert list(e.step()) == [3, 1]
        assert e.step() == {1: (7, 1, "*"), 2: (0, 4, "*")}
        e.drain()
        e.check_answers()

    def test_as_many_go_as_memory_takes(self, engine, clock):
        e = engine(num_blocks=9, policy=Priority(), clock=clock)
        for handle, prompt in ((1, 12), (2, 8), (3, 6), (4, 4)):
            e.add(handle, prompt, max_tokens=1 if handle == 4 else 4, priority=1)
        e.step()  # 3, 2, 2 blocks, and 1 that is free again
        assert e.memory.num_free == 2
        e.add(5, prompt=14, max_tokens=1)
        # It needs 4. The 2 that are free are for 1 and 2, so those of 3 are not enough, and 2 goes as well.
        assert e.step() == {1: (12, 1, "*"), 5: (0, 14, "*")}
        assert e.scheduler.load().preemptions == 2
        e.drain()
        e.check_answers()

    def test_nobody_goes_if_it_would_not_be_enough(self, engine, clock):
        e = engine(num_blocks=6, policy=Priority(), clock=clock)
        e.add(1, prompt=11, max_tokens=2)
        e.add(2, prompt=5, max_tokens=4, priority=1)
        e.step()
        e.add(3, prompt=16, max_tokens=1, priority=0)
        assert list(e.step()) == [1, 2]
        assert e.scheduler.load().preemptions == 0

    def test_nobody_goes_if_there_is_room(self, engine, clock):
        e = engine(num_blocks=6, policy=Priority(), clock=clock)
        e.add(1, prompt=2, max_tokens=4, priority=1)
        e.step()
        e.add(2, prompt=2, max_tokens=1)
        assert list(e.step()) == [1, 2]
        assert e.scheduler.load().preemptions == 0

    def test_nobody_goes_while_a_row_that_is_ending_makes_room(self, engine, clock):
        e = engine(num_blocks=8, max_num_seqs=2, policy=Priority(), clock=clock)
        e.add(1, prompt=2, max_tokens=1, priority=1)
        e.add(2, prompt=2, max_tokens=4, priority=1)
        e.plan()
        e.add(3, prompt=2, max_tokens=1)
        assert e.ran(e.plan()) == {2: (2, 1, "*")}
        e.drain()
        assert e.scheduler.load().preemptions == 0
        e.check_answers()

    def test_equals_do_not_take_places(self, engine, clock):
        e = engine(num_blocks=8, max_num_seqs=1, policy=Priority(), clock=clock)
        e.add(1, prompt=2, max_tokens=4)
        e.step()
        e.add(2, prompt=2, max_tokens=1)
        assert list(e.step()) == [1]

    def test_who_has_been_there_for_half_the_difference_is_safe(self, engine, clock):
        e = engine(num_blocks=8, max_num_seqs=1, policy=Priority(ageing=10), clock=clock)
        e.add(1, prompt=2, max_tokens=30, priority=1)
        e.step()
        clock.now = 5.1
        e.add(2, prompt=2, max_tokens=1)
        assert list(e.step()) == [1]
        clock.now = 14.0
        e.add(3, prompt=2, max_tokens=1, priority=-1)
        assert list(e.step()) == [3]

    def test_the_victim_leaves_when_its_step_in_flight_is_committed(self, engine, clock):
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

    def test_a_lone_row_makes_way(self, engine, clock):
        e = engine(num_blocks=3, policy=Priority(), clock=clock)
        e.add(1, prompt=8, max_tokens=4, priority=1)
        e.step()
        e.add(2, prompt=8, max_tokens=1)
        assert list(e.step()) == [2]
        e.drain()
        e.check_answers()


class TestTimeSlice:
    def test_rows_take_turns_of_a_quantum(self, engine):
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

    def test_nobody_goes_to_the_back_while_nobody_waits(self, engine):
        e = engine(num_blocks=16, policy=TimeSlice(2))
        e.add(1, prompt=2, max_tokens=9)
        e.add(2, prompt=2, max_tokens=9)
        for _ in range(5):
            assert list(e.step()) == [1, 2]
        e.drain()
        assert e.scheduler.load().preemptions == 0

    def test_one_that_comes_when_the_quantum_is_long_used_up_is_let_in_at_once(self, engine):
        e = engine(num_blocks=16, max_num_seqs=1, policy=TimeSlice(2))
        e.add(1, prompt=2, max_tokens=9)
        for _ in range(5):
            e.step()
        e.add(2, prompt=2, max_tokens=1)
        assert list(e.step()) == [2]

    def test_nobody_has_to_go_for_one_there_is_room_for(self, engine):
        e = engine(num_blocks=16, max_num_seqs=2, policy=TimeSlice(1))
        e.add(1, prompt=2, max_tokens=9)
        e.step()
        e.add(2, prompt=2, max_tokens=9)
        assert list(e.step()) == [1, 2]
        assert e.scheduler.load().preemptions == 0

    def test_what_is_computed_again_is_not_counted(self, engine):
        e = engine(num_blocks=16, max_num_seqs=1, max_num_batched_tokens=2, policy=TimeSlice(2))
        e.add(1, prompt=8, max_tokens=4)
        e.add(2, prompt=8, max_tokens=4)
        e.drain()
        assert e.scheduler.load().preemptions == 2
        e.check_answers()
