import numpy as np

from batchsched import Request
from batchsched.waiting import Entry, WaitingQueue


def entry(rank, turn, size=1):
    tokens = np.zeros(size, np.int32)
    return Entry(
        Request(turn, tokens, 1), rank, turn, target=9, prefix=None, tokens=tokens, queued_at=0.0, held=False
    )


def test_by_rank_then_by_turn():
    queue = WaitingQueue()
    entries = [entry(2.0, 1), entry(1.0, 3), entry(1.0, 2), entry(0.5, 4)]
    for each in entries:
        queue.push(each)
    assert [queue.pop() for _ in range(4)] == [entries[i] for i in (3, 2, 1, 0)]
    assert len(queue) == 0


def test_one_that_comes_back_takes_its_old_place():
    queue = WaitingQueue()
    first, second = entry(1.0, 1), entry(2.0, 2)
    queue.push(first)
    queue.push(second)
    assert queue.pop() is first
    queue.push(first)
    assert queue.first() is first


def test_counts_leave_out_what_was_discarded():
    queue = WaitingQueue()
    entries = [entry(turn, turn, size=turn) for turn in range(1, 5)]
    for each in entries:
        queue.push(each)
    queue.discard(entries[0])
    queue.discard(entries[2])
    assert (len(queue), queue.num_tokens) == (2, 6)
    assert [queue.pop(), queue.pop()] == [entries[1], entries[3]]
    assert not queue


def test_what_was_discarded_does_not_pile_up():
    queue = WaitingQueue()
    stays = entry(-1.0, 0)
    queue.push(stays)
    for turn in range(1, 10_000):
        leaves = entry(turn, turn)
        queue.push(leaves)
        queue.discard(leaves)
    assert len(queue._heap) < 100
    assert queue.pop() is stays
