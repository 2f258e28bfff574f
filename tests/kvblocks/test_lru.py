from collections import OrderedDict

import numpy as np
import pytest

from kvblocks.errors import IntegrityError
from kvblocks.lru import LruQueue


def ids(*blocks):
    return np.array(blocks, np.int32)


def test_pops_oldest_first():
    queue = LruQueue(8)
    queue.append(ids(3, 1))
    queue.append(ids(5))
    assert len(queue) == 3
    assert queue.pop(2).tolist() == [3, 1]
    assert queue.pop(1).tolist() == [5]
    assert len(queue) == 0
    assert queue.pop(0).tolist() == []


def test_a_removed_block_that_comes_back_is_the_newest():
    queue = LruQueue(8)
    queue.append(ids(7, 2, 5))
    queue.remove(ids(7))
    assert queue.blocks().tolist() == [2, 5]
    queue.append(ids(7))
    assert queue.blocks().tolist() == [2, 5, 7]
    assert queue.pop(3).tolist() == [2, 5, 7]


def test_many_dead_entries_are_passed():
    queue = LruQueue(2000)
    queue.append(np.arange(2000, dtype=np.int32))
    queue.remove(np.arange(1500, dtype=np.int32))
    assert queue.pop(2).tolist() == [1500, 1501]
    assert len(queue) == 498


@pytest.mark.parametrize(("num_blocks", "seed"), [(5, 0), (40, 1), (1000, 2)])
def test_agrees_with_an_ordered_dict(num_blocks, seed):
    rng = np.random.default_rng(seed)
    queue, model = LruQueue(num_blocks), OrderedDict()
    for _ in range(600):
        action = rng.integers(3)
        if action == 0:
            outside = np.array([block for block in range(num_blocks) if block not in model], np.int32)
            chosen = rng.permutation(outside)[: rng.integers(outside.size + 1)]
            queue.append(chosen)
            model.update(dict.fromkeys(chosen.tolist()))
        elif action == 1:
            chosen = rng.permutation(np.array(list(model), np.int32))[: rng.integers(len(model) + 1)]
            queue.remove(chosen)
            for block in chosen.tolist():
                del model[block]
        else:
            n = int(rng.integers(len(model) + 1))
            assert queue.pop(n).tolist() == [model.popitem(last=False)[0] for _ in range(n)]
        assert queue.blocks().tolist() == list(model)
        assert len(queue) == len(model)
        queue.check()


def test_check_sees_a_wrong_size():
    queue = LruQueue(4)
    queue.append(ids(0, 1))
    queue._size = 1
    with pytest.raises(IntegrityError, match="queue of 1 blocks has 2 live entries"):
        queue.check()
