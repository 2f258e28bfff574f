import numpy as np
import pytest

from batchsched.batch import Batch


def batch(*parts):
    rows, starts, counts = zip(*parts)
    return Batch(np.array(rows), np.array(starts, np.int32), np.array(counts, np.int32))


def parts(batch):
    return list(zip(*(column.tolist() for column in batch)))


@pytest.mark.parametrize(
    ("budget", "left"),
    [
        (10, [(3, 0, 4), (1, 9, 1), (2, 5, 5)]),
        (7, [(3, 0, 4), (1, 9, 1), (2, 5, 2)]),
        (5, [(3, 0, 4), (1, 9, 1)]),
        (4, [(3, 0, 4)]),
        (1, [(3, 0, 1)]),
    ],
)
def test_the_budget_goes_to_the_first(budget, left):
    cut = batch((3, 0, 4), (1, 9, 1), (2, 5, 5)).within(budget)
    assert parts(cut) == left
    assert cut.counts.dtype == np.int32


def test_how_many_of_the_first_rows_fit(engine):
    memory = engine(num_blocks=8).memory
    for row in range(4):
        memory.open(row, None)
    three = batch((0, 0, 8), (1, 0, 4), (3, 0, 5))  # 2, 1 and 2 blocks of 4 tokens
    assert [three.num_fitting(memory, blocks) for blocks in range(6)] == [0, 0, 1, 2, 2, 3]
    assert Batch.empty().num_fitting(memory, 0) == 0


def test_joined():
    one, other = batch((3, 0, 4)), batch((1, 9, 1), (2, 5, 5))
    assert parts(one.joined(other)) == [(3, 0, 4), (1, 9, 1), (2, 5, 5)]
    assert one.joined(Batch.empty()) is one
    assert parts(Batch.empty().joined(other)) == parts(other)
