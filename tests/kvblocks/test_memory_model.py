"""PagedMemory under random schedules: what it promises, and what is in the blocks that it hands out.

Two independent views are kept. The model predicts every hit and every free count with lists and dicts. The
cells are what the steps that have run wrote to each slot. A step writes first and reads then: a row that
reads anything but what a cold run would have written would be a fluent wrong answer.
"""

from collections import Counter, OrderedDict, deque
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvblocks import OutOfBlocks, PagedMemory

BLOCK = 4
ROWS = 3
ROW_BLOCKS = 5
EXTRAS = [{}, {}, {}, {"salt": "x"}, {"lora": "x"}]
STEMS = [[1] * 16, [1] * 6 + [2] * 10]


class Request:
    """`tokens` are those known now; `fate` is what it samples, over and over."""

    def __init__(self, tokens, extra, prefix, reuse, fate):
        self.tokens = tokens
        self.extra = tuple(extra.items())
        self.prefix = prefix
        self.reuse = reuse
        self.fate = fate
        self.known = len(tokens)  # tokens the memory knows of
        self.hashed = len(tokens) // BLOCK
        self.published = 0
        self.row = None
        self.planned = 0
        self.computed = 0
        self.steps = 0  # in flight
        self.aborted = False
        self.blocks = []

    def content(self, length):
        """What the keys and values of token `length - 1` depend on."""
        tokens = self.tokens + [self.fate] * (length - len(self.tokens))
        return self.extra, tuple(tokens[:length])


class Step(NamedTuple):
    """A planned step of some rows: for each the request, its blocks, and the positions it runs."""

    requests: list
    blocks: list
    starts: list
    ends: list
    right: list  # how many tokens will be known and stay: the others are drafts that are rejected


class MemoryModel:
    """Which blocks are free, cached or held, and by what content; a block at a time."""

    def __init__(self, num_blocks):
        self.blank = list(reversed(range(num_blocks)))
        self.lru = OrderedDict()
        self.refs = Counter()
        self.index = {}

    @property
    def num_free(self):
        return len(self.blank) + len(self.lru)

    def hits(self, request):
        found = []
        while request.reuse and (len(found) + 1) * BLOCK < request.known and len(found) < ROW_BLOCKS:
            block = self.index.get(request.content((len(found) + 1) * BLOCK))
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks):
        for block in blocks:
            self.lru.pop(block, None)
            self.refs[block] += 1

    def take(self):
        if self.blank:
            block = self.blank.pop()
        else:
            block, _ = self.lru.popitem(last=False)
            self.index = {content: holder for content, holder in self.index.items() if holder != block}
        self.refs[block] = 1
        return block

    def release(self, blocks):
        published = set(self.index.values())
        freed = []
        for block in blocks:
            self.refs[block] -= 1
            if not self.refs[block]:
                freed.append(block)
        self.blank += [block for block in freed if block not in published]
        self.lru.update((block, None) for block in reversed(freed) if block in published)

    def reset(self):
        self.index = {content: block for content, block in self.index.items() if self.refs[block]}
        self.blank += self.lru
        self.lru.clear()


def all_or_some(request):
    """How many tokens of the request a step may leave computed."""
    end = max(len(request.tokens), min(request.planned + 1, ROW_BLOCKS * BLOCK))
    return st.just(end) | st.integers(request.planned, end)


class MemoryMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(3, 12))
    def start(self, num_blocks):
        self.memory = PagedMemory(
            num_blocks=num_blocks, block_size=BLOCK, max_rows=ROWS, max_blocks_per_row=ROW_BLOCKS
        )
        self.model = MemoryModel(num_blocks)
        self.tokens = np.full((ROWS, ROW_BLOCKS * BLOCK), -1, np.int32)
        self.cells = {}
        self.mirror = {}  # (row, index) → block, as a model runner would keep it
        self.preempted = []
        self.running = []
        self.steps = deque()  # in flight

    @rule(
        length=st.integers(0, 16),
        tail=st.lists(st.integers(1, 2), max_size=2),
        extra=st.sampled_from(EXTRAS),
        reuse=st.sampled_from([True] * 4 + [False]),
        fate=st.integers(1, 2),
        reserve=st.integers(0, 2),
        data=st.data(),
    )
    def arrive(self, length, tail, extra, reuse, fate, reserve, data):
        """A new request gets a row and mostly is planned at once; it may repeat another and its answer."""
        stems = STEMS + [request.tokens for request in self.running + self.preempted]
        tokens = data.draw(st.sampled_from(stems))[:length] + tail
        prefix = self.memory.prefix(np.array(tokens, np.int32), extra, reuse=reuse)
        request = Request(tokens, extra, prefix, reuse, fate)
        self.allocate(request, reserve, data)
        if data.draw(st.sampled_from([True, True, False])):
            self.plan_step([request], [len(tokens)], data)

    @rule(reserve=st.integers(0, 2), data=st.data())
    def resume(self, reserve, data):
        if self.preempted:
            which = data.draw(st.integers(0, len(self.preempted) - 1))
            self.allocate(self.preempted.pop(which), reserve, data)

    @rule(data=st.data())
    def plan(self, data):
        """Some rows are to run for some tokens."""
        requests = [r for r in self.running if not r.aborted and data.draw(st.booleans())]
        self.plan_step(requests, [data.draw(all_or_some(request)) for request in requests], data)

    @rule()
    def run(self):
        if self.steps:
            self.run_step()

    @rule(data=st.data())
    def abort(self, data):
        if self.running:
            data.draw(st.sampled_from(self.running)).aborted = True

    @rule(data=st.data(), preempted=st.booleans())
    def free(self, data, preempted):
        if self.running:
            self.stop(data.draw(st.sampled_from(self.running)), preempted)

    @rule()
    def drain_changes(self):
        for row, index, block in np.stack(self.memory.drain_changes(), axis=1).tolist():
            self.mirror[row, index] = block
        held = {(r.row, index): block for r in self.running for index, block in enumerate(r.blocks)}
        assert self.mirror == held

    @rule(sure=st.sampled_from([False] * 9 + [True]))
    def reset(self, sure):
        if sure:
            self.memory.pool.reset()
            self.model.reset()

    def allocate(self, request, reserve, data):
        if len(self.running) == ROWS:
            self.stop(data.draw(st.sampled_from(self.running)), preempted=True)
        hits = self.model.hits(request)
        num_cached = len(hits) * BLOCK
        length = data.draw(st.integers(num_cached, ROW_BLOCKS * BLOCK + 1))
        fits = self.memory.fits(request.prefix, length, reserve)
        assert self.memory.cached_tokens(request.prefix) == num_cached

        request.row = data.draw(st.sampled_from(sorted({0, 1, 2} - {other.row for other in self.running})))
        assert self.memory.allocate(request.row, request.prefix) == num_cached
        self.model.hold(hits)
        request.blocks = hits
        request.computed = request.planned = num_cached
        request.published = len(hits)
        self.tokens[request.row] = -1
        self.running.append(request)
        # What `fits` predicted is what the allocation has left.
        lacking = -(-length // BLOCK) - len(hits)
        assert fits == (length <= ROW_BLOCKS * BLOCK and lacking + reserve <= self.model.num_free)

    def plan_step(self, requests, ends, data):
        if not self.grow(requests, ends):
            return
        starts = [request.planned for request in requests]
        right = list(ends)
        for place, (request, end) in enumerate(zip(requests, ends)):
            self.publish(request, min(end // BLOCK, request.hashed))
            known = max(len(request.tokens), request.planned)
            if end > known and not request.steps:
                right[place] = data.draw(st.integers(known, end))
            request.planned = right[place]
            request.steps += 1
        self.steps.append(Step(requests, [list(r.blocks) for r in requests], starts, ends, right))

    def run_step(self):
        """Run the oldest step in flight: all writes, then all reads, then its commit."""
        step = self.steps.popleft()
        for request, blocks, start, end, right in zip(*step):
            for position in range(start, end):
                content = request.content(position + 1) if position < right else "a rejected draft"
                self.cells[blocks[position // BLOCK], position % BLOCK] = content
        for request, blocks, _, _, right in zip(*step):
            request.steps -= 1
            for position in range(right):
                cell = self.cells.get((blocks[position // BLOCK], position % BLOCK))
                assert cell == request.content(position + 1), "a row reads what no step wrote for it"
        live = [(request, right) for request, right in zip(step.requests, step.right) if not request.aborted]
        for request, length in live:
            request.tokens = list(request.content(max(length, len(request.tokens)))[1])
            self.tokens[request.row, :length] = request.tokens[:length]
        rows = np.array([request.row for request, _ in live], np.int32)
        self.memory.commit(rows, np.array([length for _, length in live], np.int32), self.tokens)
        for request, length in live:
            self.publish(request, length // BLOCK)
            request.hashed = max(request.hashed, length // BLOCK)
            request.computed = length

    def publish(self, request, end):
        for number in range(request.published, end):
            self.model.index.setdefault(request.content((number + 1) * BLOCK), request.blocks[number])
        request.published = max(request.published, end)

    def grow(self, requests, lengths):
        rows = [request.row for request in requests]
        lacking = [max(-(-n // BLOCK) - len(r.blocks), 0) for r, n in zip(requests, lengths)]
        assert self.memory.needed(rows, lengths) == sum(lacking)
        if sum(lacking) > self.model.num_free:
            with pytest.raises(OutOfBlocks) as caught:
                self.memory.grow(rows, lengths)
            assert (caught.value.requested, caught.value.free) == (sum(lacking), self.model.num_free)
            return False
        self.memory.grow(rows, lengths)
        for request, length, n in zip(requests, lengths, lacking):
            request.blocks = request.blocks + [self.model.take() for _ in range(n)]
            written = request.blocks[request.planned // BLOCK : -(-length // BLOCK)]
            assert {self.model.refs[block] for block in written} <= {1}, "a row writes where another reads"
        return True

    def stop(self, request, preempted):
        while request.steps:
            self.run_step()
        self.running.remove(request)
        self.memory.free(request.row)
        self.model.release(request.blocks)
        self.mirror = {at: block for at, block in self.mirror.items() if at[0] != request.row}
        request.known = max(request.known, request.computed)
        request.row, request.blocks, request.computed, request.planned = None, [], 0, 0
        if preempted and not request.aborted:
            self.preempted.append(request)

    @invariant()
    def agrees(self):
        self.memory.check()
        assert self.memory.num_free == self.model.num_free
        refs = self.memory.pool.refcounts.tolist()
        assert refs == [self.model.refs[block] for block in range(self.memory.num_blocks)]
        for request in self.running:
            row = self.memory.tables.array[request.row].tolist()
            assert row == request.blocks + [-1] * (ROW_BLOCKS - len(request.blocks))
        published = {b: self.memory.pool.key_of(b) is not None for b in range(self.memory.num_blocks)}
        assert {b for b, has_key in published.items() if has_key} == set(self.model.index.values())

    def teardown(self):
        if not hasattr(self, "memory"):
            return
        while self.steps:
            self.run_step()
        for request in self.running:
            self.memory.free(request.row)
        self.memory.check()
        assert self.memory.num_free == self.memory.num_blocks


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize(("num_blocks", "seed"), [(8, 0), (8, 1), (40, 2)])
def test_no_request_reads_what_another_prefix_left(num_blocks, seed):
    """300 requests over 6 shared prefixes, three at a time, in a pool that evicts all the time."""
    rng = np.random.default_rng(seed)
    memory = PagedMemory(num_blocks=num_blocks, block_size=BLOCK, max_rows=ROWS, max_blocks_per_row=8)
    stems = [rng.integers(0, 50, rng.integers(2, 17)).tolist() for _ in range(6)]
    tokens = np.full((ROWS, 32), -1, np.int32)
    cells = np.full((num_blocks, BLOCK), None, object)
    held = {}
    hits = 0
    for _ in range(300):
        row = int(rng.integers(ROWS))
        if row in held:
            memory.free(row)
            del held[row]
        prompt = [*stems[rng.integers(6)], *rng.integers(0, 50, rng.integers(1, 12)).tolist()]
        prefix = memory.prefix(np.array(prompt, np.int32))
        if not memory.fits(prefix, len(prompt)):
            continue
        cached = memory.allocate(row, prefix)
        memory.grow([row], [len(prompt)])
        held[row] = prompt
        hits += cached
        assert cached < len(prompt)
        tokens[row, : len(prompt)] = prompt
        slots = [
            (memory.tables.array[row, position // BLOCK], position % BLOCK) for position in range(len(prompt))
        ]
        for position in range(cached, len(prompt)):
            cells[slots[position]] = tuple(prompt[: position + 1])
        assert [cells[slot] for slot in slots] == [tuple(prompt[: n + 1]) for n in range(len(prompt))]
        # Some rows stop half-way, as if they were aborted.
        memory.commit([row], [int(rng.integers(cached, len(prompt) + 1))], tokens)
    memory.check()
    for row in held:
        memory.free(row)
    assert memory.num_free == num_blocks
    assert hits > 200
    assert memory.pool.stats.evicted > 50
