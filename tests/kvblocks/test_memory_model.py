"""PagedMemory under random schedules: what it promises, and what is in the blocks that it hands out.

Two independent views are kept. The model predicts every hit and every free count with lists and dicts. The
cells are what a cold run would have written to each slot: a hit whose cells hold anything else would be a
fluent wrong answer.
"""

from collections import Counter, OrderedDict

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
    def __init__(self, tokens, extra, prefix, reuse):
        self.tokens = tokens
        self.extra = tuple(extra.items())
        self.prefix = prefix
        self.reuse = reuse
        self.known = len(tokens)  # tokens the memory knows of
        self.row = None
        self.computed = 0
        self.blocks = []

    def content(self, length):
        """What the keys and values of token `length - 1` depend on."""
        return self.extra, tuple(self.tokens[:length])


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
    return st.just(len(request.tokens)) | st.integers(request.computed, len(request.tokens))


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

    @rule(
        length=st.integers(0, 16),
        tail=st.lists(st.integers(1, 2), max_size=2),
        extra=st.sampled_from(EXTRAS),
        reuse=st.sampled_from([True] * 4 + [False]),
        reserve=st.integers(0, 2),
        data=st.data(),
    )
    def arrive(self, length, tail, extra, reuse, reserve, data):
        """A new request gets a row and mostly is computed at once; it may repeat another and its answer."""
        stems = STEMS + [request.tokens for request in self.running + self.preempted]
        tokens = data.draw(st.sampled_from(stems))[:length] + tail
        prefix = self.memory.prefix(np.array(tokens, np.int32), extra, reuse=reuse)
        request = Request(tokens, extra, prefix, reuse)
        self.allocate(request, reserve, data)
        if data.draw(st.sampled_from([True, True, False])):
            self.run([request], [len(tokens)], data)

    @rule(reserve=st.integers(0, 2), data=st.data())
    def resume(self, reserve, data):
        if self.preempted:
            which = data.draw(st.integers(0, len(self.preempted) - 1))
            self.allocate(self.preempted.pop(which), reserve, data)

    @rule(data=st.data())
    def step(self, data):
        """Some rows run for some tokens."""
        requests = [request for request in self.running if data.draw(st.booleans())]
        lengths = [data.draw(all_or_some(request)) for request in requests]
        self.run(requests, lengths, data)

    @rule(data=st.data())
    def plan(self, data):
        """Some rows get room for a step that never runs."""
        requests = [request for request in self.running if data.draw(st.booleans())]
        self.grow(requests, [data.draw(all_or_some(request)) for request in requests])

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
        request.computed = num_cached
        self.tokens[request.row] = -1
        self.running.append(request)
        for position in range(num_cached):
            cell = self.cells[hits[position // BLOCK], position % BLOCK]
            assert cell == request.content(position + 1), "a cached block holds another prefix"
        # What `fits` predicted is what the allocation has left.
        lacking = -(-length // BLOCK) - len(hits)
        assert fits == (length <= ROW_BLOCKS * BLOCK and lacking + reserve <= self.model.num_free)

    def run(self, requests, lengths, data):
        """Compute up to `lengths`; a request whose tokens are all computed gets its next ones."""
        if not self.grow(requests, lengths):
            return
        for request, length in zip(requests, lengths):
            self.write(request, length)
        rows = np.array([request.row for request in requests], np.int32)
        self.memory.commit(rows, np.array(lengths, np.int32), self.tokens)
        for request, length in zip(requests, lengths):
            for end in range((request.computed // BLOCK + 1) * BLOCK, length + 1, BLOCK):
                self.model.index.setdefault(request.content(end), request.blocks[end // BLOCK - 1])
            request.computed = length
            room = ROW_BLOCKS * BLOCK - length
            if length == len(request.tokens) and room:
                request.tokens += data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=min(room, 4)))

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
        for request, n in zip(requests, lacking):
            request.blocks = request.blocks + [self.model.take() for _ in range(n)]
        return True

    def write(self, request, length):
        self.tokens[request.row, :length] = request.tokens[:length]
        for position in range(request.computed, length):
            block = request.blocks[position // BLOCK]
            assert self.model.refs[block] == 1, "a row writes into a block that another one reads"
            self.cells[block, position % BLOCK] = request.content(position + 1)

    def stop(self, request, preempted):
        self.running.remove(request)
        self.memory.free(request.row)
        self.model.release(request.blocks)
        self.mirror = {at: block for at, block in self.mirror.items() if at[0] != request.row}
        request.known = max(request.known, request.computed)
        request.row, request.blocks, request.computed = None, [], 0
        if preempted:
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
