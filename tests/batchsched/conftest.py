"""Memories that count blocks the plainest way, and a runner that believes only what plans tell it."""

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from batchsched import Finish, Limits, Request, Scheduler, StepResult, Swap


class CountingMemory:
    """Blocks are a number a row. Misuse is an assertion."""

    def __init__(self, num_blocks, block_size=4):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.held = {}
        self.published = {}

    @property
    def num_free(self):
        return self.num_blocks - sum(self.held.values())

    def prefix(self, tokens, extra, *, reuse):
        return None

    def fits(self, prefix, length, reserve):
        return -(-length // self.block_size) + reserve <= self.num_free

    def open(self, row, prefix):
        assert row not in self.held
        self.held[row] = 0
        return 0

    def needed(self, rows, lengths):
        return sum(self.missing(row, length) for row, length in zip(rows.tolist(), lengths.tolist()))

    def missing(self, row, length):
        return max(-(-length // self.block_size) - self.held[row], 0)

    def grow(self, rows, lengths):
        assert len(set(rows.tolist())) == len(rows)
        assert self.needed(rows, lengths) <= self.num_free
        for row, length in zip(rows.tolist(), lengths.tolist()):
            self.held[row] += self.missing(row, length)

    def computed(self, rows, lengths, tokens):
        for row, length in zip(rows.tolist(), lengths.tolist()):
            assert length <= self.held[row] * self.block_size
            self.published[row] = tokens[row, :length].tolist()

    def close(self, row):
        del self.held[row]

    def check_empty(self):
        assert self.held == {}


class SwapMemory(CountingMemory):
    """Has a host tier: a number of blocks, and for each prefix what it keeps there."""

    def __init__(self, num_blocks, block_size=4, host_blocks=0):
        super().__init__(num_blocks, block_size)
        self.host_blocks = host_blocks
        self.prefixes = {}  # row: the prefix it is open with
        self.has = {}  # row: how much of it is computed
        self.swapped_out = self.swapped_in = 0
        self.host = {}  # prefix: (blocks, computed tokens)

    def prefix(self, tokens, extra, *, reuse):
        return object()

    def fits(self, prefix, length, reserve):
        assert self.host.get(prefix, (0, 0))[1] < length
        return super().fits(prefix, length, reserve)

    def open(self, row, prefix):
        super().open(row, prefix)
        assert prefix not in self.prefixes.values()
        self.prefixes[row] = prefix
        self.held[row], self.has[row] = self.host.pop(prefix, (0, 0))
        assert self.num_free >= 0
        self.swapped_in += self.has[row]
        return self.has[row]

    def computed(self, rows, lengths, tokens):
        super().computed(rows, lengths, tokens)
        self.has.update(zip(rows.tolist(), lengths.tolist()))

    def close(self, row):
        super().close(row)
        del self.prefixes[row], self.has[row]

    def swap_out(self, row):
        blocks = -(-self.has[row] // self.block_size)
        if blocks + sum(blocks for blocks, _ in self.host.values()) > self.host_blocks:
            return False
        self.swapped_out += self.has[row]
        self.host[self.prefixes[row]] = blocks, self.has[row]
        self.close(row)
        return True

    def forget(self, prefix):
        self.host.pop(prefix, None)

    def check_empty(self):
        super().check_empty()
        assert self.host == {}


class PrefixMemory:
    """Blocks have ids, reference counts and, once full and computed, the tokens up to their end as a key."""

    def __init__(self, num_blocks, block_size=4):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.references = [0] * num_blocks
        self.keys = {}  # block: all tokens up to its end
        self.rows = {}  # row: its blocks
        self.prefixes = {}
        self.published = {}

    @property
    def num_free(self):
        return self.references.count(0)

    def prefix(self, tokens, extra, *, reuse):
        return SimpleNamespace(tokens=tokens.tolist(), extra=tuple(extra), reuse=reuse)

    def hits(self, prefix):
        found = []
        by_key = {key: block for block, key in self.keys.items()}
        for end in range(self.block_size, len(prefix.tokens), self.block_size):
            block = by_key.get((prefix.extra, tuple(prefix.tokens[:end])))
            if block is None or not prefix.reuse:
                break
            found.append(block)
        return found

    def fits(self, prefix, length, reserve):
        hits = self.hits(prefix)
        revived = sum(self.references[block] == 0 for block in hits)
        return -(-length // self.block_size) - len(hits) + revived + reserve <= self.num_free

    def open(self, row, prefix):
        assert row not in self.rows
        self.rows[row] = self.hits(prefix)
        self.prefixes[row] = prefix
        for block in self.rows[row]:
            self.references[block] += 1
        return len(self.rows[row]) * self.block_size

    def needed(self, rows, lengths):
        return sum(self.missing(row, length) for row, length in zip(rows.tolist(), lengths.tolist()))

    def missing(self, row, length):
        return max(-(-length // self.block_size) - len(self.rows[row]), 0)

    def grow(self, rows, lengths):
        assert self.needed(rows, lengths) <= self.num_free
        for row, length in zip(rows.tolist(), lengths.tolist()):
            for _ in range(self.missing(row, length)):
                free = [block for block in range(self.num_blocks) if not self.references[block]]
                # Those without a key first; of those with one the last, so that beginnings stay.
                keyed = [block for block in free if block in self.keys]
                block = min(set(free) - set(keyed), default=keyed and keyed[-1])
                self.keys.pop(block, None)
                self.references[block] = 1
                self.rows[row].append(block)

    def computed(self, rows, lengths, tokens):
        for row, length in zip(rows.tolist(), lengths.tolist()):
            self.published[row] = tokens[row, :length].tolist()
            prefix = self.prefixes[row]
            prefix.tokens = max(prefix.tokens, tokens[row, :length].tolist(), key=len)
            for index in range(length // self.block_size):
                key = (prefix.extra, tuple(prefix.tokens[: (index + 1) * self.block_size]))
                if key not in self.keys.values():
                    self.keys[self.rows[row][index]] = key

    def close(self, row):
        for block in self.rows.pop(row):
            self.references[block] -= 1
        del self.prefixes[row]

    def check_empty(self):
        assert self.rows == {}
        assert self.references == [0] * self.num_blocks


def token_at(handle, position):
    """What every runner here samples at a position: a function of who and where, so loss and repeats show."""
    return (handle * 31 + position * 7) % 97


def answer(request, max_model_len):
    """The tokens a request must get and why it ends, worked out one by one."""
    tokens = []
    size = len(request.tokens)
    while True:
        token = token_at(request.handle, size + len(tokens))
        tokens.append(token)
        if token in request.stop_ids and len(tokens) >= request.min_tokens:
            return tokens, Finish.STOP
        if len(tokens) == request.max_tokens or size + len(tokens) == max_model_len:
            return tokens, Finish.LENGTH


class Runner:
    """Applies plans to rows of its own, and samples `token_at`. It knows at once what it sampled itself."""

    def __init__(self):
        self.rows = {}

    def run(self, plan):
        for row in plan.closed.tolist():
            del self.rows[row]
        for opened in plan.opened:
            assert opened.row not in self.rows
            self.rows[opened.row] = SimpleNamespace(
                handle=opened.handle, tokens=opened.tokens.tolist(), computed=opened.num_cached
            )
        sampled, counts, drafts = [], [], plan.drafts.tolist()
        for row, start, count, samples, drafted in zip(
            *(column.tolist() for column in plan[1:5]), plan.num_drafts.tolist()
        ):
            state = self.rows[row]
            assert start == state.computed
            assert count > drafted >= 0
            state.computed += count - drafted
            assert state.computed <= len(state.tokens)
            assert samples == (state.computed == len(state.tokens))
            assert samples or not drafted
            if samples:
                counts.append(self.verify(state, [drafts.pop(0) for _ in range(drafted)]))
                sampled += state.tokens[-counts[-1] :]
        assert not drafts
        result = StepResult(plan.step, np.array(sampled, np.int32))
        return result._replace(counts=np.array(counts, np.int32)) if plan.drafts.size else result

    def verify(self, state, drafts):
        """Sample behind each draft up to the first that is wrong. Returns how many tokens that gave."""
        for number, draft in enumerate([*drafts, None], start=1):
            state.tokens.append(token_at(state.handle, len(state.tokens)))
            if state.tokens[-1] != draft:
                return number
            state.computed += 1
        raise AssertionError("the token after the last draft has no draft to agree with")


class Engine:
    """A scheduler, its memory and a runner; `emitted` and `finished` are by handle."""

    def __init__(self, memory, *, policy=None, preemption=None, clock=None, **limits):
        self.memory = memory
        defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "headroom": 0}
        self.limits = Limits(**defaults | limits)
        clocks = {"clock": clock} if clock else {}
        self.scheduler = Scheduler(self.limits, memory, policy, preemption, **clocks)
        self.runner = Runner()
        self.results = deque()
        self.plans = deque()  # those in flight
        self.emitted = {}
        self.finished = {}
        self.requests = {}

    def add(self, handle, prompt, max_tokens, **options):
        """`prompt` is a length, for tokens that no other handle shares, or the tokens."""
        if isinstance(prompt, int):
            prompt = [token_at(handle, position) for position in range(prompt)]
        request = Request(handle, np.array(prompt, np.int32), max_tokens, **options)
        self.scheduler.add(request)
        self.requests[handle] = request
        self.emitted[handle] = []

    def draft(self, handle, right, wrong=0):
        """Draft and return tokens for a request that runs: first some right ones, then some wrong ones."""
        (row,) = (row for row, state in self.runner.rows.items() if state.handle == handle)
        known = len(self.runner.rows[row].tokens)
        drafts = [token_at(handle, position) for position in range(known, known + right)] + [-1] * wrong
        self.scheduler.draft(np.array([row]), np.array([drafts], np.int32))
        return drafts

    def may_draft(self):
        """Requests that run, may have drafts, and have no step in flight that samples."""
        sampling = {row for plan in self.plans for row in plan.rows[plan.samples].tolist()}
        return [
            state.handle
            for row, state in self.runner.rows.items()
            if row not in sampling
            and state.handle in self.requests
            and state.handle not in self.finished
            and self.requests[state.handle].max_drafts
        ]

    @property
    def num_in_flight(self):
        return len(self.results)

    def plan(self):
        plan = self.scheduler.plan()
        if plan.rows.size:
            self.results.append(self.runner.run(plan))
            self.plans.append(plan)
        return plan

    def commit(self):
        self.memory.published = {}
        self.plans.popleft()
        committed = self.scheduler.commit(self.results.popleft())
        for row, tokens in self.memory.published.items():
            assert tokens == self.runner.rows[row].tokens[: len(tokens)]
        for handle, token, finished, count in zip(
            *(column.tolist() for column in (committed.handles, committed.tokens, committed.finished)),
            committed.num_generated.tolist(),
        ):
            assert handle not in self.finished
            self.emitted[handle].append(token)
            assert len(self.emitted[handle]) == count
            if finished:
                self.finished[handle] = Finish(finished)
        return committed

    def step(self):
        """Plan and commit one step. Returns what ran: {handle: (start, count)}, * marking who sampled."""
        ran = self.ran(self.plan())
        if self.results:
            self.commit()
        return ran

    def ran(self, plan):
        return {
            self.runner.rows[row].handle: (start, count, "*") if samples else (start, count)
            for row, start, count, samples in zip(*(column.tolist() for column in plan[1:5]))
        }

    def drain(self, depth=0):
        """Run until all is done, with `depth` further steps planned before each commit."""
        while self.scheduler.has_unfinished or self.results:
            while len(self.results) <= depth and self.plan().rows.size:
                pass
            self.commit()

    def check_answers(self):
        """Every request that was added and not aborted got just what it should have."""
        for handle, request in self.requests.items():
            tokens, why = answer(request, self.limits.max_model_len)
            assert self.emitted[handle] == tokens
            assert self.finished[handle] == why
        self.memory.check_empty()


@pytest.fixture
def engine():
    """Makes an engine: `engine(num_blocks, block_size=4, prefix_cache=False, host_blocks=None, **limits)`.

    With `host_blocks` it swaps.
    """

    def make(num_blocks, block_size=4, prefix_cache=False, host_blocks=None, **options):
        if host_blocks is not None:
            return Engine(SwapMemory(num_blocks, block_size, host_blocks), preemption=Swap(), **options)
        memory = (PrefixMemory if prefix_cache else CountingMemory)(num_blocks, block_size)
        return Engine(memory, **options)

    return make


@pytest.fixture
def engine_on():
    """Makes an engine on a memory of the test's own: `engine_on(memory, **limits)`."""
    return Engine


@pytest.fixture
def oracle():
    """`oracle(request, max_model_len)`: the tokens it must get, and why it ends."""
    return answer
