"""On real paged memory: a position reads all before it through the block table, or answers differ."""

from types import SimpleNamespace

import numpy as np
import pytest

from batchsched import Fcfs, Priority, Recompute, ShortestFirst, StepResult, Swap, TimeSlice
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
    """Keeps block tables by their changes alone, and one number for each slot of the caches."""

    def __init__(self, memory, max_num_seqs, host_blocks=0):
        self.memory = memory
        self.tables = np.full((max_num_seqs, MAX_MODEL_LEN // BLOCK_SIZE), -1)
        self.cache = np.full((memory.num_blocks, BLOCK_SIZE), -1, np.int64)
        self.host = np.full((host_blocks, BLOCK_SIZE), -1, np.int64)
        self.rows = {}

    def run(self, plan):
        for row in plan.closed.tolist():
            del self.rows[row]
            self.tables[row] = -1
        for opened in plan.opened:
            self.rows[opened.row] = SimpleNamespace(handle=opened.handle, tokens=opened.tokens.tolist())
        copies = self.memory.drain_copies()
        self.host[copies.out.destinations] = self.cache[copies.out.sources]
        self.cache[copies.in_.destinations] = self.host[copies.in_.sources]
        changes = self.memory.drain_changes()
        self.tables[changes.rows, changes.indices] = changes.blocks
        sampled, counts, drafts = [], [], plan.drafts.tolist()
        for row, start, count, samples, drafted in zip(
            *(column.tolist() for column in plan[1:5]), plan.num_drafts.tolist()
        ):
            tokens = self.rows[row].tokens
            guesses = [drafts.pop(0) for _ in range(drafted)]
            for position, token in enumerate((tokens + guesses)[start : start + count], start):
                before = self.cache[self.slot(row, position - 1)] if position else 0
                self.cache[self.slot(row, position)] = fold(int(before), token)
            if samples:
                known = len(tokens)
                while len(tokens) == known or guesses[len(tokens) - known - 1 :][:1] == tokens[-1:]:
                    tokens.append(int(self.cache[self.slot(row, len(tokens) - 1)]) % 89)
                sampled += tokens[known:]
                counts.append(len(tokens) - known)
        return StepResult(plan.step, np.array(sampled, np.int32), np.array(counts, np.int32))

    def slot(self, row, position):
        block = self.tables[row, position // BLOCK_SIZE]
        assert block >= 0
        return block, position % BLOCK_SIZE


def serve(e, memory, depth, draft=None):
    """Run until all is done, looking at the memory after every commit."""
    while e.scheduler.has_unfinished or e.results:
        if draft:
            draft()
        while len(e.results) <= depth and e.plan().rows.size:
            pass
        e.commit()
        memory.check()
    for handle, request in e.requests.items():
        assert e.emitted[handle] == alone(request)
    assert memory.num_free == memory.num_blocks


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
    serve(e, memory, depth)
    assert e.scheduler.load().preemptions > 0
    assert (memory.stats.hits > 0) == prefix_caching


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("policy", [Fcfs(), Priority(10), TimeSlice(3), ShortestFirst(10)])
@pytest.mark.parametrize("preemption", [Recompute(), Swap()])
@pytest.mark.parametrize(("prefix_caching", "host_blocks"), [(False, 20), (True, 8)])
def test_preempted_by_any_policy_in_any_way(
    engine_on, depth, policy, preemption, prefix_caching, host_blocks
):
    memory = PagedMemory(
        num_blocks=13,
        block_size=BLOCK_SIZE,
        max_rows=6,
        max_blocks_per_row=MAX_MODEL_LEN // BLOCK_SIZE,
        prefix_caching=prefix_caching,
        host_blocks=host_blocks,
    )
    now = iter(range(10**6))
    e = engine_on(
        memory,
        policy=policy,
        preemption=preemption,
        clock=lambda: float(next(now)),
        max_num_seqs=6,
        max_num_batched_tokens=24,
        max_model_len=MAX_MODEL_LEN,
    )
    e.runner = PagedRunner(memory, max_num_seqs=6, host_blocks=host_blocks)
    rng = np.random.default_rng(depth)
    arriving = iter(range(60))

    def arrive():
        handle = next(arriving, None)
        if handle is not None:
            e.add(
                handle,
                rng.integers(0, 3, rng.integers(1, 20)).tolist(),
                max_tokens=int(rng.integers(4, 18)),
                priority=int(rng.integers(0, 3)),
                max_drafts=handle % 3,
            )

    def draft():
        arrive()
        for handle in e.may_draft():
            known = len(e.emitted[handle])
            drafts = [*alone(e.requests[handle])[known : known + rng.integers(3)], 0, 0]
            (row,) = (row for row, state in e.runner.rows.items() if state.handle == handle)
            e.scheduler.draft([row], [drafts[: e.requests[handle].max_drafts]])

    arrive()
    serve(e, memory, depth, draft)
    assert len(e.requests) == 60
    assert e.scheduler.load().preemptions > 0
    if not prefix_caching:
        swaps = isinstance(preemption, Swap)
        assert (memory.host_pool.stats.allocated > 0) == swaps
    assert memory.host_pool.num_free == memory.host_pool.num_blocks
