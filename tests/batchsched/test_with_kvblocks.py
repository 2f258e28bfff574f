"""On kvblocks.PagedMemory: a position reads all before it through the block table, or answers differ."""

from types import SimpleNamespace

import numpy as np
import pytest

from batchsched import Fcfs, NeverFits, Priority, Recompute, ShortestFirst, StepResult, Swap, TimeSlice
from kvblocks import PagedMemory

BLOCK_SIZE = 4
MAX_MODEL_LEN = 40


def fold(before, token):
    """The "keys and values" of a position: they depend on its token and on all before it."""
    return (before * 1_000_003 + token + 1) % (2**31 - 1)


def alone(request):
    """The tokens of a request that runs alone."""
    state = 0
    for token in request.prompt.tolist():
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
        for row in plan.freed.tolist():
            del self.rows[row]
            self.tables[row] = -1
        for admitted in plan.admitted:
            self.rows[admitted.row] = SimpleNamespace(handle=admitted.handle, tokens=admitted.tokens.tolist())
        copies = self.memory.drain_copies()
        self.host[copies.swap_out.destinations] = self.cache[copies.swap_out.sources]
        self.cache[copies.swap_in.destinations] = self.host[copies.swap_in.sources]
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
        assert e.generated[handle] == alone(request)
    assert memory.num_free == memory.num_blocks


@pytest.mark.parametrize(
    ("depth", "budget", "prefix_caching"),
    [(0, 5, False), (0, 64, True), (1, 5, True), (1, 64, False), (2, 5, False), (2, 64, True)],
)
def test_every_request_gets_the_tokens_it_gets_alone(engine_on, depth, budget, prefix_caching):
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


@pytest.mark.parametrize(
    ("depth", "policy", "preemption", "prefix_caching"),
    [
        (0, Fcfs(), Recompute(), False),
        (1, Fcfs(), Swap(), True),
        (2, Fcfs(), Swap(), False),
        (0, Priority(10), Swap(), True),
        (1, Priority(10), Recompute(), False),
        (2, Priority(10), Recompute(), True),
        (0, TimeSlice(3), Swap(), False),
        (1, TimeSlice(3), Swap(), True),
        (2, TimeSlice(3), Recompute(), False),
        (0, ShortestFirst(10), Recompute(), True),
        (1, ShortestFirst(10), Swap(), False),
        (2, ShortestFirst(10), Swap(), True),
    ],
)
def test_preemption_under_every_policy_and_mode(engine_on, depth, policy, preemption, prefix_caching):
    host_blocks = 8 if prefix_caching else 20
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
            known = len(e.generated[handle])
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


@pytest.mark.parametrize("windows", [(None, None), (None, 6), (6,)])
def test_all_admitted_requests_finish_over_any_layer_groups(engine_on, undisturbed, windows):
    """A request that could outgrow all blocks alone is refused, and all others finish."""
    memory = PagedMemory(
        num_blocks=12,
        block_size=BLOCK_SIZE,
        max_rows=3,
        max_blocks_per_row=MAX_MODEL_LEN // BLOCK_SIZE,
        windows=windows,
    )
    e = engine_on(memory, max_num_seqs=3, max_num_batched_tokens=9, max_model_len=MAX_MODEL_LEN)
    refused = []
    for handle, max_tokens in enumerate(range(1, 38, 2)):
        try:
            e.add(handle, prompt=3, max_tokens=max_tokens)
        except NeverFits:
            refused.append(3 + max_tokens)
    e.drain()
    for handle, request in e.requests.items():
        assert e.generated[handle] == undisturbed(request, MAX_MODEL_LEN)[0]
    memory.check()
    assert memory.num_free == memory.num_blocks
    # Of two groups each has 6 blocks, or 24 tokens; a 25th is sampled and never run.
    assert refused == (list(range(26, 41, 2)) if len(windows) == 2 else [])
