"""BlockPool against a slow, obvious model of itself, over random histories."""

from collections import Counter, OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvblocks import AllCleared, BlockPool, BlockRemoved, BlockStored, OutOfBlocks

KEYS = [bytes([n]) * 32 for n in range(20)]


class PoolModel:
    """The same rules with lists and dicts, a block at a time."""

    def __init__(self, num_blocks):
        self.blank = list(reversed(range(num_blocks)))
        self.lru = OrderedDict()
        self.refs = Counter()
        self.index = {}
        self.key_of = {}
        self.events = []

    @property
    def num_free(self):
        return len(self.blank) + len(self.lru)

    def allocate(self, n):
        return [self._take() for _ in range(n)]

    def _take(self):
        if self.blank:
            block = self.blank.pop()
        else:
            block, _ = self.lru.popitem(last=False)
            self._unpublish(block)
        self.refs[block] = 1
        return block

    def _unpublish(self, block):
        key = self.key_of.pop(block)
        del self.index[key]
        self.events.append(BlockRemoved(block, key))

    def share(self, blocks):
        for block in blocks:
            self.lru.pop(block, None)
            self.refs[block] += 1

    def release(self, blocks):
        freed = []
        for block in blocks:
            self.refs[block] -= 1
            if not self.refs[block]:
                freed.append(block)
        for block in reversed(freed):
            if block in self.key_of:
                self.lru[block] = None
        self.blank += [block for block in freed if block not in self.key_of]

    def publish(self, blocks, keys):
        for block, key in zip(blocks, keys):
            if key not in self.index:
                self.index[key] = block
                self.key_of[block] = key
                self.events.append(BlockStored(block, key))

    def reset(self):
        for block in self.lru:
            self._unpublish(block)
            self.blank.append(block)
        self.lru.clear()
        if not self.index:
            self.events.append(AllCleared())
        return len(self.index)


class PoolMachine(RuleBasedStateMachine):
    """Sequences allocate, share, publish and release; each holds one reference to each of its blocks."""

    @initialize(num_blocks=st.sampled_from([1, 5, 8, 12]))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks, record_events=True)
        self.model = PoolModel(num_blocks)
        self.sequences = []

    @rule(n=st.integers(0, 5), publish=st.booleans(), keep=st.booleans(), data=st.data())
    def allocate(self, n, publish, keep, data):
        if n > self.model.num_free:
            with pytest.raises(OutOfBlocks) as caught:
                self.pool.allocate(n)
            assert (caught.value.requested, caught.value.free) == (n, self.model.num_free)
            if self.sequences:
                self.release_one(0)
            return
        blocks = self.pool.allocate(n).tolist()
        assert blocks == self.model.allocate(n)
        self.sequences.append(blocks)
        if publish:
            self.publish_some(blocks, data)
        if not keep:
            self.release_one(-1)

    @rule(data=st.data())
    def share(self, data):
        held = [block for block, count in self.model.refs.items() if count]
        blocks = data.draw(st.permutations(sorted({*held, *self.model.lru})))
        blocks = blocks[: data.draw(st.integers(1, 4))]
        self.pool.share(blocks)
        self.model.share(blocks)
        self.sequences.append(blocks)

    @rule(data=st.data())
    def release(self, data):
        if self.sequences:
            self.release_one(data.draw(st.integers(0, len(self.sequences) - 1)))

    def release_one(self, which):
        blocks = self.sequences.pop(which)
        self.pool.release(blocks)
        self.model.release(blocks)

    @rule(data=st.data())
    def publish(self, data):
        if self.sequences:
            self.publish_some(data.draw(st.sampled_from(self.sequences)), data)

    def publish_some(self, sequence, data):
        blocks = [block for block in sequence if block not in self.model.key_of]
        keys = data.draw(st.lists(st.sampled_from(KEYS), min_size=len(blocks), max_size=len(blocks)))
        self.pool.publish(blocks, keys)
        self.model.publish(blocks, keys)

    @rule(sure=st.sampled_from([False] * 7 + [True]))
    def reset(self, sure):
        if sure:
            assert self.pool.reset() == self.model.reset()

    @rule()
    def drain_events(self):
        assert self.pool.events() == self.model.events
        self.model.events = []

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def match(self, keys):
        expected = []
        for key in keys:
            if key not in self.model.index:
                break
            expected.append(self.model.index[key])
        assert self.pool.match(keys).tolist() == expected

    @invariant()
    def agrees(self):
        self.pool.check()
        assert self.pool.num_free == self.model.num_free
        assert self.pool.refcounts.tolist() == [self.model.refs[b] for b in range(self.pool.num_blocks)]
        assert [self.pool.lookup(key) for key in KEYS] == [self.model.index.get(key, -1) for key in KEYS]

    def teardown(self):
        """When every sequence has gone, every block is free."""
        if not hasattr(self, "pool"):
            return
        for blocks in self.sequences:
            self.pool.release(blocks)
        self.pool.check()
        assert self.pool.allocate(self.pool.num_blocks).size == self.pool.num_blocks


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
