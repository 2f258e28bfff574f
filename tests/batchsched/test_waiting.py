"""The waiting queue, and requests on hold, which are skipped and keep their place."""

import numpy as np
import pytest

from batchsched import Request
from batchsched.waiting import Entry, WaitingQueue


def entry(rank, arrival_index, size=1):
    tokens = np.zeros(size, np.int32)
    return Entry(
        Request(arrival_index, tokens, 1),
        rank,
        arrival_index,
        target=9,
        prefix=None,
        tokens=tokens,
        queued_at=0.0,
        held=False,
    )


def test_order_is_by_rank_then_arrival_index():
    queue = WaitingQueue()
    entries = [entry(2.0, 1), entry(1.0, 3), entry(1.0, 2), entry(0.5, 4)]
    for each in entries:
        queue.push(each)
    assert [queue.pop() for _ in range(4)] == [entries[i] for i in (3, 2, 1, 0)]
    assert len(queue) == 0


def test_an_entry_pushed_again_returns_to_its_place():
    queue = WaitingQueue()
    first, second = entry(1.0, 1), entry(2.0, 2)
    queue.push(first)
    queue.push(second)
    assert queue.pop() is first
    queue.push(first)
    assert queue.first() is first


def test_counts_leave_out_removed_entries():
    queue = WaitingQueue()
    entries = [entry(index, index, size=index) for index in range(1, 5)]
    for each in entries:
        queue.push(each)
    queue.remove(entries[0])
    queue.remove(entries[2])
    assert (len(queue), queue.num_tokens) == (2, 6)
    assert [queue.pop(), queue.pop()] == [entries[1], entries[3]]
    assert not queue


def test_removed_entries_do_not_pile_up():
    queue = WaitingQueue()
    stays = entry(-1.0, 0)
    queue.push(stays)
    for index in range(1, 10_000):
        removed = entry(index, index)
        queue.push(removed)
        queue.remove(removed)
    assert len(queue._heap) < 100
    assert queue.pop() is stays


def test_a_held_request_does_not_block_those_after_it(engine):
    e = engine(num_blocks=8, max_num_seqs=1)
    e.add(1, prompt=2, max_tokens=1, held=True)
    e.add(2, prompt=2, max_tokens=1)
    assert e.step() == {2: (0, 2, "*")}
    assert e.step() == {}
    assert e.scheduler.has_unfinished
    load = e.scheduler.load()
    assert (load.running, load.waiting, load.held, load.waiting_tokens) == (0, 1, 1, 2)


def test_a_held_request_keeps_its_place(engine):
    e = engine(num_blocks=8, max_num_seqs=1)
    e.add(1, prompt=2, max_tokens=1, held=True)
    for handle in (2, 3, 4):
        e.add(handle, prompt=2, max_tokens=1)
    assert list(e.step()) == [2]
    assert e.scheduler.release(1)
    assert e.scheduler.load().held == 0
    e.drain()
    assert list(e.finished) == [2, 1, 3, 4]
    e.check_answers()


def test_hold_and_release_can_be_repeated(engine):
    e = engine(num_blocks=8, max_num_seqs=1)
    for handle in (1, 2):
        e.add(handle, prompt=2, max_tokens=1)
    for _ in range(100):
        assert e.scheduler.hold(1)
        assert e.scheduler.hold(1)
        assert e.scheduler.release(1)
        assert e.scheduler.release(1)
    assert e.scheduler.load().waiting == 2
    assert e.scheduler.hold(1)
    assert list(e.step()) == [2]
    e.scheduler.release(1)
    e.drain()
    e.check_answers()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_running_request_on_hold_is_preempted(engine, depth):
    e = engine(num_blocks=8)
    e.add(1, prompt=2, max_tokens=6)
    e.add(2, prompt=2, max_tokens=6)
    for _ in range(depth + 1):
        e.plan()
    assert e.scheduler.hold(1)
    while e.results:
        e.commit()
    assert e.scheduler.load()[:2] == (1, 1)
    assert list(e.step()) == [2]
    e.scheduler.release(1)
    assert list(e.step()) == [2, 1]
    e.drain(depth)
    e.check_answers()


def test_a_request_may_be_released_before_its_preemption_is_over(engine):
    e = engine(num_blocks=8)
    e.add(1, prompt=2, max_tokens=6)
    e.plan()
    e.scheduler.hold(1)
    e.scheduler.release(1)
    e.commit()
    assert list(e.step()) == [1]
    e.drain()
    e.check_answers()


def test_a_held_request_whose_last_token_is_in_flight_ends(engine):
    e = engine(num_blocks=8)
    e.add(1, prompt=2, max_tokens=1)
    e.plan()
    assert e.scheduler.hold(1)
    e.commit()
    e.check_answers()
    assert not e.scheduler.has_unfinished


def test_a_held_request_can_be_aborted(engine):
    e = engine(num_blocks=8)
    e.add(1, prompt=2, max_tokens=1, held=True)
    assert e.scheduler.abort(1)
    assert e.scheduler.load()[:3] == (0, 0, 0)
    assert not e.scheduler.has_unfinished


def test_unknown_handles_are_neither_held_nor_released(engine):
    e = engine(num_blocks=8)
    assert not e.scheduler.hold(1)
    assert not e.scheduler.release(1)
