"""Swapping, offloading and layer groups under random schedules, on an array of contents.

The cells hold, for each slot of each tier, what a cold run would have written there. Steps are planned ahead
of those that have run, and run in that order: each performs its copies, then writes, then reads. Copies go
in the order that `drain_copies` prescribes, and all at once within a list, as a device may. Wherever keys or
tables say that something can be read, the cells must agree: a block that was given out too early, or
copied from too late, would be another request's fluent answer.
"""

import random
from collections import deque
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvblocks import BlockCopies, OutOfBlocks, PagedMemory, PrefixHasher, TableChanges

BLOCK = 4
ROWS = 4
ROW_BLOCKS = 6
CAPACITY = ROW_BLOCKS * BLOCK
STEMS = [[1] * 24, [1] * 6 + [2] * 18]
LAYERS = [(None,), (None,), (None, 5), (6, 3), (None, 1), (4,), (5, None, 9)]


class Request:
    def __init__(self, tokens, prefix, reuse=True):
        self.tokens = tokens
        self.prefix = prefix
        self.reuse = reuse
        self.known = len(tokens)
        self.row = None
        self.computed = 0
        self.planned = 0
        self.steps = 0  # in flight
        self.swapped = None  # tokens in the host tier


class Step(NamedTuple):
    """A planned step: what it changes first, and the positions that it runs of some requests."""

    copies: BlockCopies
    changes: list[TableChanges]  # of each group
    work: list[tuple[Request, int, int, int]]  # request, row, start, end


class World:
    """Rows, requests and both tiers' cells. Every choice is left to `pick(sequence)`."""

    def __init__(self, pick):
        self.pick = pick
        windows = pick(LAYERS)
        host_blocks = pick([0, 1, 3, 6, 40])
        self.memory = PagedMemory(
            num_blocks=pick(range(3, 12)) * len(windows),
            block_size=BLOCK,
            max_rows=ROWS,
            max_blocks_per_row=ROW_BLOCKS,
            prefix_caching=pick([True, True, True, False]),
            host_blocks=host_blocks,
            windows=windows,
        )
        self.windows = windows
        self.device = np.full((self.memory.num_blocks, BLOCK), None, object)
        self.host = np.full((max(host_blocks, 1), BLOCK), None, object)
        self.tables = np.zeros((len(windows), ROWS, ROW_BLOCKS), int)  # as a runner keeps them
        self.tokens = np.full((ROWS, CAPACITY), -1, np.int32)
        self.truth = {}  # key → (group, tokens up to the block's end)
        self.running = []
        self.waiting = []
        self.steps = deque()  # in flight

    def keys(self, tokens):
        """The keys of all full blocks of `tokens`, a list for each group; remembers what they stand for."""
        plain = PrefixHasher(BLOCK).extend(tokens)
        keys = []
        for group in range(len(self.windows)):
            suffix = group.to_bytes(2, "little") if group else b""
            keys.append([key + suffix for key in plain])
            for n, key in enumerate(keys[-1]):
                self.truth[key] = group, tuple(tokens[: (n + 1) * BLOCK])
        return keys

    def needed_from(self, group, length):
        """The first position that the token at position `length` reads."""
        window = self.windows[group]
        return 0 if window is None else max(length - window + 1, 0)

    def expected_hit(self, request):
        """By trying all lengths: every block that holds a needed position is on one of the tiers."""
        swapped = request.swapped or 0
        if not (request.reuse and self.memory.prefix_caching):
            return swapped
        keys = self.keys(request.tokens[: request.known])
        pools = [self.memory.pool] + ([self.memory.host_pool] if self.memory.host_pool else [])
        for count in range(min((request.known - 1) // BLOCK, ROW_BLOCKS), 0, -1):
            wanted = [
                keys[group][n]
                for group in range(len(self.windows))
                for n in range(self.needed_from(group, count * BLOCK) // BLOCK, count)
            ]
            if len(self.windows) == 1 and self.windows[0] is None:
                # A run on the device, then a run on the host.
                places = [[pool.lookup(key) >= 0 for pool in pools] for key in wanted]
                lost = next((n for n, place in enumerate(places) if not place[0]), count)
                found = all(place[-1] for place in places[lost:]) and (lost == count or len(pools) > 1)
            else:
                found = all(any(pool.lookup(key) >= 0 for pool in pools) for key in wanted)
            if found:
                return max(count * BLOCK, swapped)
        return swapped

    def arrive(self):
        stems = STEMS + [request.tokens for request in self.running + self.waiting]
        tail = [self.pick([1, 2]) for _ in range(self.pick([1, 2]))]
        tokens = (self.pick(stems)[: self.pick(range(21))] + tail)[: CAPACITY - 1]
        reuse = self.pick([True] * 5 + [False])
        prefix = self.memory.prefix(np.array(tokens, np.int32), reuse=reuse)
        request = Request(tokens, prefix, reuse)
        if self.allocate(request) and self.pick([True, True, False]):
            self.plan([request], [len(tokens)])

    def resume(self):
        if self.waiting:
            self.allocate(self.waiting.pop(self.pick(range(len(self.waiting)))))

    def look(self):
        """A blocked request asks again and again."""
        if self.waiting:
            request = self.pick(self.waiting)
            assert self.memory.cached_tokens(request.prefix) == self.expected_hit(request)

    def allocate(self, request):
        if len(self.running) == ROWS:
            self.leave(self.pick(self.running), self.pick([True, False]))
        hit = self.expected_hit(request)
        assert self.memory.cached_tokens(request.prefix) == hit
        length = self.pick(range(hit, CAPACITY + 1))
        fits = self.memory.fits(request.prefix, length)
        row = self.pick(sorted(set(range(ROWS)) - {other.row for other in self.running}))
        try:
            assert self.memory.allocate(row, request.prefix) == hit
        except OutOfBlocks:
            assert not fits
            self.waiting.append(request)
            return False
        request.row, request.computed, request.planned, request.swapped = row, hit, hit, None
        assert hit < len(request.tokens)
        self.tokens[row] = -1
        self.running.append(request)
        assert fits == (self.memory.needed([row], [length]) <= self.memory.num_free)
        return True

    def step(self):
        """Some rows are to run."""
        requests = [request for request in self.running if self.pick([True, True, False])]
        lengths = []
        for request in requests:
            size = len(request.tokens)
            lengths.append(self.pick([size, *range(request.planned, size + 1)]))
        self.plan(requests, lengths)

    def plan(self, requests, lengths):
        rows = [request.row for request in requests]
        needed, free = self.memory.needed(rows, lengths), self.memory.num_free
        try:
            self.memory.grow(rows, lengths)
        except OutOfBlocks:
            assert needed > free
            self.leave(self.pick(self.running), self.pick([True, False]))
            return
        assert needed == free - self.memory.num_free
        work = [(r, r.row, r.planned, length) for r, length in zip(requests, lengths)]
        for request, length in zip(requests, lengths):
            request.planned = length
            request.steps += 1
            self.keys(request.tokens)
        self.drain(work)
        if self.pick([True, True, False]):
            self.run()

    def drain(self, work=()):
        changes = [self.memory.drain_changes(group) for group in range(len(self.windows))]
        self.steps.append(Step(self.memory.drain_copies(), changes, list(work)))

    def run(self):
        """Run the oldest step in flight, and commit it."""
        if not self.steps:
            return
        copies, changes, work = self.steps.popleft()
        for copied in copies:
            assert len(set(copied.destinations.tolist())) == copied.destinations.size
        self.host[copies.swap_out.destinations] = self.device[copies.swap_out.sources]
        self.device[copies.swap_in.destinations] = self.host[copies.swap_in.sources]
        for group, (rows, indices, blocks) in enumerate(changes):
            self.tables[group, rows, indices] = blocks
        for request, row, start, end in work:
            self.write(request, row, start, end)
        for request, row, start, end in work:
            self.read(request, row, start, end)
            request.steps -= 1
        self.commit([(request, end) for request, _, _, end in work])
        self.check_keys()

    def write(self, request, row, start, end):
        for group in range(len(self.windows)):
            for position in range(start, end):
                block = self.tables[group, row, position // BLOCK]
                self.device[block, position % BLOCK] = group, tuple(request.tokens[: position + 1])

    def read(self, request, row, start, end):
        """What the positions from `start` on attend to is what a cold run would have computed."""
        for group in range(len(self.windows)):
            for position in range(self.needed_from(group, start), end):
                cell = self.device[self.tables[group, row, position // BLOCK], position % BLOCK]
                assert cell == (group, tuple(request.tokens[: position + 1]))

    def commit(self, ends):
        for request, end in ends:
            self.tokens[request.row, :end] = request.tokens[:end]
        rows = np.array([request.row for request, _ in ends], int)
        self.memory.commit(rows, np.array([end for _, end in ends], int), self.tokens)
        for request, end in ends:
            request.computed = end
            request.known = max(request.known, end)
            if end == CAPACITY and not request.steps:
                self.finish(request)
            elif end == len(request.tokens) < CAPACITY:
                request.tokens = [*request.tokens, self.pick([1, 2])]

    def check_keys(self):
        """What keys promise has been written, or is yet to be by a step in flight."""
        promised = [set(), set()]  # by tier
        for copies, _, work in self.steps:
            promised[0].update(copies.swap_in.destinations.tolist())
            promised[1].update(copies.swap_out.destinations.tolist())
            for _, row, start, end in work:
                for group in self.memory.groups:
                    promised[0].update(group.tables.array[row, start // BLOCK : -(-end // BLOCK)].tolist())
        if self.memory.host_pool:
            waiting, fresh = self.memory._host.pending.references()
            promised[0].update(waiting.tolist())
            promised[1].update(fresh.tolist())
        tiers = [(self.memory.pool, self.device, promised[0])]
        if self.memory.host_pool:
            tiers.append((self.memory.host_pool, self.host, promised[1]))
        for pool, cells, later in tiers:
            for block in set(range(pool.num_blocks)) - later:
                key = pool.key_of(block)
                if key is not None:
                    group, tokens = self.truth_of(key)
                    first = len(tokens) - BLOCK
                    assert cells[block].tolist() == [(group, tokens[: first + n + 1]) for n in range(BLOCK)]

    def truth_of(self, key):
        if key not in self.truth:
            for request in self.running + self.waiting:
                self.keys(request.tokens)
        return self.truth[key]

    def preempt(self):
        if self.running:
            self.leave(self.pick(self.running), self.pick([True, True, False]))

    def rotate(self):
        """Rows leave and come back within one plan."""
        for _ in range(self.pick([1, 2, 3])):
            self.preempt()
            self.resume()

    def leave(self, request, swap):
        if not self.rest(request):
            return
        self.keys(request.tokens)
        row = request.row
        if swap and self.memory.swap_out(row):
            request.swapped = request.computed
        else:
            if swap:
                self.memory.check()  # nothing has changed
            self.memory.free(row)
        request.row = None
        request.computed = request.planned = 0
        self.running.remove(request)
        self.waiting.append(request)

    def rest(self, request):
        """Run all steps that have the request. Whether it is still running then."""
        while request.steps:
            self.run()
        return request in self.running

    def end(self):
        if self.running:
            request = self.pick(self.running)
            if self.rest(request):
                self.finish(request)

    def finish(self, request):
        self.keys(request.tokens)
        self.memory.free(request.row)
        self.running.remove(request)

    def discard(self):
        if self.waiting:
            request = self.waiting.pop(self.pick(range(len(self.waiting))))
            self.memory.discard(request.prefix)

    def reset(self):
        self.drain()
        self.memory.reset()

    def agrees(self):
        self.memory.check()
        for request in self.running:
            held = sum(group.tables.held(request.row).size for group in self.memory.groups)
            assert held <= self.memory.blocks_for(len(request.tokens))
            for group, window in enumerate(self.windows):
                tables = self.memory.groups[group].tables
                first = self.needed_from(group, request.computed) // BLOCK
                assert (tables.array[request.row, first : tables.counts[request.row]] >= 0).all()
                if window is not None:
                    assert (tables.array[request.row, :first] == -1).all()

    def end_all(self):
        self.drain()
        while self.steps:
            self.run()
        for request in self.running:
            self.memory.free(request.row)
        for request in self.waiting:
            self.memory.discard(request.prefix)
        self.memory.check()
        assert self.memory.num_free == self.memory.num_blocks
        if self.memory.host_pool:
            assert self.memory.host_pool.num_free == self.memory.host_pool.num_blocks
        assert self.memory.reset() == 0


MOVES = ["arrive", "resume", "look", "step", "run", "drain", "preempt", "rotate", "end", "discard"]
OFTEN = [*MOVES, "arrive", "arrive", "resume", "resume", "look", "step", "step", "step", "rotate"]


class TiersMachine(RuleBasedStateMachine):
    @initialize(data=st.data())
    def start(self, data):
        self.world = World(lambda sequence: data.draw(st.sampled_from(sequence)))

    @rule(data=st.data(), move=st.sampled_from(OFTEN))
    def move(self, data, move):
        self.world.pick = lambda sequence: data.draw(st.sampled_from(sequence))
        getattr(self.world, move)()

    @rule(sure=st.sampled_from([False] * 9 + [True]))
    def reset(self, sure):
        if sure:
            self.world.reset()

    @invariant()
    def agrees(self):
        if hasattr(self, "world"):
            self.world.agrees()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.end_all()


TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", range(8))
def test_a_long_walk(seed):
    """What a search for small examples seldom reaches: many requests, both tiers full, everything reused."""
    rng = random.Random(seed)
    world = World(rng.choice)
    for _ in range(400):
        getattr(world, rng.choice(OFTEN))()
        world.agrees()
    world.end_all()
