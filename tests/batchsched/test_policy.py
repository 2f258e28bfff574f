"""Policies order and choose; the scheduler obeys."""

import numpy as np

from batchsched import Fcfs, Request


class ByPriority(Fcfs):
    def rank(self, request, turn, arrival):
        return request.priority


class ShortestFirst(Fcfs):
    def rank(self, request, turn, arrival):
        return request.tokens.size + request.max_tokens


class TheFirst:
    """All are equal, and the head of the line gives way."""

    def rank(self, request, turn, arrival):
        return 0

    def victim(self, line, needy):
        return 0


def test_fcfs_ranks_by_turn_whatever_the_arrival():
    request = Request(1, np.array([1], np.int32), 1, priority=-5)
    assert Fcfs().rank(request, turn=3, arrival=100.0) < Fcfs().rank(request, turn=4, arrival=50.0)


def test_fcfs_preempts_the_last_in_line():
    assert Fcfs().victim(np.array([4, 2, 7]), needy=0) == 2
    assert Fcfs().victim(np.array([4, 2, 7]), needy=1) == 2


def test_fcfs_lets_the_last_in_line_wait():
    assert Fcfs().victim(np.array([4, 2, 7]), needy=2) is None


def test_the_queue_is_in_rank_order_and_equals_in_the_order_added(engine):
    e = engine(num_blocks=16, max_num_seqs=1, policy=ByPriority())
    for handle, priority in ((1, 2), (2, 0), (3, 1), (4, 0)):
        e.add(handle, prompt=2, max_tokens=1, priority=priority)
    e.drain()
    assert list(e.finished) == [2, 4, 3, 1]


def test_the_shortest_first(engine):
    e = engine(num_blocks=16, max_num_seqs=1, policy=ShortestFirst())
    for handle, prompt, max_tokens in ((1, 9, 1), (2, 2, 3), (3, 4, 2)):
        e.add(handle, prompt, max_tokens)
    e.drain()
    assert list(e.finished) == [2, 3, 1]


def test_rows_run_in_rank_order_too(engine):
    e = engine(num_blocks=16, max_num_batched_tokens=4, policy=ByPriority())
    e.add(1, prompt=2, max_tokens=4, priority=1)
    e.step()
    e.add(2, prompt=6, max_tokens=2, priority=0)
    assert e.step() == {1: (2, 1, "*"), 2: (0, 3)}  # rows that run go before those that wait
    assert e.step() == {2: (3, 3, "*"), 1: (3, 1, "*")}
    assert list(e.step()) == [2, 1]


def test_nobody_is_admitted_in_a_step_that_preempted_even_ahead_of_the_victim(engine):
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


def test_a_policy_may_take_from_those_ahead(engine):
    e = engine(num_blocks=4, policy=TheFirst())
    e.add(1, prompt=7, max_tokens=2)
    e.add(2, prompt=8, max_tokens=2)
    assert list(e.step()) == [1, 2]
    assert e.step() == {2: (8, 1, "*")}
    assert e.step() == {1: (0, 8, "*")}
    e.check_answers()


def test_an_equal_that_comes_back_is_in_line_where_it_was(engine):
    e = engine(num_blocks=5, policy=TheFirst())
    e.add(1, prompt=7, max_tokens=3)
    e.add(2, prompt=12, max_tokens=4)
    assert list(e.step()) == [1, 2]
    assert e.step() == {2: (12, 1, "*")}  # 1 gave its 2 blocks, of which 2 took one
    e.memory.num_blocks = 7
    assert list(e.step()) == [2, 1]  # those let in come last in the step
    assert list(e.step()) == [1, 2]
