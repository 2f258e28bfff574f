"""On real paged memory: a position reads all before it through the block table, or answers differ."""

from types import SimpleNamespace

import numpy as np
import pytest

from batchsched import StepResult
from kvblocks import PagedMemory

BLOCK_SIZE = 4
MAX_MODEL_LEN = 40


def fold(before, token):
    """The "keys and values" of a position: they depend on its token and on all before it."""
    return (before * 1_000_003 + token + 1) % (2**31 - 1)


def alone(request):
    """What a request gets if nothing else runs."""
    state = 0
    for token in request.tokens.tolist():
        state = fold(state, token)
    tokens = []
    while len(tokens) < request.max_tokens:
        tokens.append(state % 89)
        if tokens[-1] in request.stop_ids:
            break
        state = fold(state, tokens[-1])
    return tokens


class PagedRunner:
    """Keeps block tables by their changes alone, and one number for each slot of the cache."""

    def __init__(self, memory, max_num_seqs):
        self.memory = memory
        self.tables = np.full((max_num_seqs, MAX_MODEL_LEN // BLOCK_SIZE), -1)
        self.cache = np.full((memory.num_blocks, BLOCK_SIZE), -1, np.int64)
        self.rows = {}

    def run(self, plan):
        for row in plan.closed.tolist():
            del self.rows[row]
            self.tables[row] = -1
        for opened in plan.opened:
            self.rows[opened.row] = SimpleNamespace(handle=opened.handle, tokens=opened.tokens.tolist())
        changes = self.memory.drain_changes()
        self.tables[changes.rows, changes.indices] = changes.blocks
        sampled = []
        for row, start, count, samples in zip(*(column.tolist() for column in plan[1:5])):
            tokens = self.rows[row].tokens
            for position in range(start, start + count):
                before = self.cache[self.slot(row, position - 1)] if position else 0
                self.cache[self.slot(row, position)] = fold(int(before), tokens[position])
            if samples:
                sampled.append(int(self.cache[self.slot(row, start + count - 1)]) % 89)
                tokens.append(sampled[-1])
        return StepResult(plan.step, np.array(sampled, np.int32))

    def slot(self, row, position):
        block = self.tables[row, position // BLOCK_SIZE]
        assert block >= 0
        return block, position % BLOCK_SIZE


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_every_answer_is_the_one_the_request_gets_alone(engine_on, depth, budget, prefix_caching):
    memory = PagedMemory(
        num_blocks=13,
        block_size=BLOCK_SIZE,
        max_rows=6,
        max_blocks_per_row=MAX_MODEL_LEN // BLOCK_SIZE,
        prefix_caching=prefix_caching,
    )
    e = engine_on(memory, max_num_seqs=6, max_num_batched_tokens=budget, max_model_len=MAX_MODEL_LEN)
    e.runner = PagedRunner(memory, max_num_seqs=6)
    rng = np.random.default_rng(depth)
    shared = rng.integers(0, 50, (4, 20)).tolist()
    for handle in range(120):
        beginning = shared[rng.integers(4)][: rng.integers(1, 20)]
        ending = rng.integers(0, 50, rng.integers(0, 4)).tolist()
        e.add(
            handle,
            beginning + ending,
            max_tokens=int(rng.integers(1, 16)),
            stop_ids=range(handle % 5),
            use_cache=handle % 7 > 0,
        )
    while e.scheduler.has_unfinished or e.results:
        while len(e.results) <= depth and e.plan().rows.size:
            pass
        e.commit()
        memory.check()
    for handle, request in e.requests.items():
        assert e.emitted[handle] == alone(request)
    assert memory.num_free == memory.num_blocks
    assert e.scheduler.load().preemptions > 0
    assert (memory.stats.hits > 0) == prefix_caching
