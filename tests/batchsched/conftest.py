"""Memories that count blocks the plainest way, and a runner that keeps rows by what plans tell it.

Where blocks have ids, a `Cache` holds what a model would have written to them.
"""

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from batchsched import Finish, Limits, Request, Scheduler, StepResult, Swap
from kvblocks import PagedMemory


class CountingMemory:
    """Blocks are a number a row. Misuse is an assertion."""

    def __init__(self, num_blocks, block_size=4):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.held = {}  # row: its number of blocks
        self.committed = {}  # row: tokens of the last commit

    @property
    def num_free(self):
        return self.num_blocks - sum(self.held.values())

    def blocks_for(self, length):
        return -(-length // self.block_size)

    def prefix(self, tokens, extra, *, reuse):
        return None

    def fits(self, prefix, length, reserve):
        return self.blocks_for(length) + reserve <= self.num_free

    def allocate(self, row, prefix):
        assert row not in self.held
        self.held[row] = 0
        return 0

    def needed(self, rows, lengths):
        return sum(self.missing(row, length) for row, length in zip(rows.tolist(), lengths.tolist()))

    def missing(self, row, length):
        return max(self.blocks_for(length) - self.held[row], 0)

    def grow(self, rows, lengths):
        assert len(set(rows.tolist())) == len(rows)
        assert self.needed(rows, lengths) <= self.num_free
        for row, length in zip(rows.tolist(), lengths.tolist()):
            self.held[row] += self.missing(row, length)

    def commit(self, rows, lengths, tokens):
        for row, length in zip(rows.tolist(), lengths.tolist()):
            assert length <= self.held[row] * self.block_size
            self.committed[row] = tokens[row, :length].tolist()

    def free(self, row):
        del self.held[row]

    def check_empty(self):
        assert self.held == {}


class SwapMemory(CountingMemory):
    """Has a host tier: a number of blocks, and for each prefix what it keeps there."""

    def __init__(self, num_blocks, block_size=4, host_blocks=0):
        super().__init__(num_blocks, block_size)
        self.host_blocks = host_blocks
        self.prefixes = {}  # row: its prefix
        self.computed = {}  # row: its computed tokens
        self.swapped_out = self.swapped_in = 0
        self.host = {}  # prefix: (blocks, computed tokens)

    def prefix(self, tokens, extra, *, reuse):
        return object()

    def fits(self, prefix, length, reserve):
        assert self.host.get(prefix, (0, 0))[1] < length
        return super().fits(prefix, length, reserve)

    def allocate(self, row, prefix):
        super().allocate(row, prefix)
        assert prefix not in self.prefixes.values()
        self.prefixes[row] = prefix
        self.held[row], self.computed[row] = self.host.pop(prefix, (0, 0))
        assert self.num_free >= 0
        self.swapped_in += self.computed[row]
        return self.computed[row]

    def commit(self, rows, lengths, tokens):
        super().commit(rows, lengths, tokens)
        self.computed.update(zip(rows.tolist(), lengths.tolist()))

    def free(self, row):
        super().free(row)
        del self.prefixes[row], self.computed[row]

    def swap_out(self, row):
        blocks = self.blocks_for(self.computed[row])
        if blocks + sum(blocks for blocks, _ in self.host.values()) > self.host_blocks:
            return False
        self.swapped_out += self.computed[row]
        self.host[self.prefixes[row]] = blocks, self.computed[row]
        self.free(row)
        return True

    def discard(self, prefix):
        self.host.pop(prefix, None)

    def check_empty(self):
        super().check_empty()
        assert self.host == {}


class PrefixMemory:
    """Blocks have ids, reference counts and, once a step that fills them is planned, all tokens as a key.

    Those that sampled tokens fill have one when that step is committed.
    """

    def __init__(self, num_blocks, block_size=4):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.references = [0] * num_blocks
        self.keys = {}  # block: all tokens up to its end
        self.held = {}  # row: its blocks
        self.prefixes = {}  # row: its prefix
        self.committed = {}  # row: tokens of the last commit

    @property
    def num_free(self):
        return self.references.count(0)

    def blocks_for(self, length):
        return -(-length // self.block_size)

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
        return self.blocks_for(length) - len(hits) + revived + reserve <= self.num_free

    def allocate(self, row, prefix):
        assert row not in self.held
        self.held[row] = self.hits(prefix)
        self.prefixes[row] = prefix
        for block in self.held[row]:
            self.references[block] += 1
        return len(self.held[row]) * self.block_size

    def needed(self, rows, lengths):
        return sum(self.missing(row, length) for row, length in zip(rows.tolist(), lengths.tolist()))

    def missing(self, row, length):
        return max(self.blocks_for(length) - len(self.held[row]), 0)

    def grow(self, rows, lengths):
        assert len(set(rows.tolist())) == len(rows)
        assert self.needed(rows, lengths) <= self.num_free
        for row, length in zip(rows.tolist(), lengths.tolist()):
            for _ in range(self.missing(row, length)):
                free = [block for block in range(self.num_blocks) if not self.references[block]]
                # Those without a key first; of those with one the last, so that beginnings stay.
                keyed = [block for block in free if block in self.keys]
                block = min(set(free) - set(keyed), default=keyed and keyed[-1])
                self.keys.pop(block, None)
                self.references[block] = 1
                self.held[row].append(block)
            self.publish(row, min(length, len(self.prefixes[row].tokens)))

    def commit(self, rows, lengths, tokens):
        for row, length in zip(rows.tolist(), lengths.tolist()):
            self.committed[row] = tokens[row, :length].tolist()
            prefix = self.prefixes[row]
            prefix.tokens = max(prefix.tokens, tokens[row, :length].tolist(), key=len)
            self.publish(row, length)

    def publish(self, row, length):
        prefix = self.prefixes[row]
        for index in range(length // self.block_size):
            key = (prefix.extra, tuple(prefix.tokens[: (index + 1) * self.block_size]))
            if key not in self.keys.values():
                self.keys[self.held[row][index]] = key

    def blocks(self, row):
        return self.held[row]

    def free(self, row):
        for block in self.held.pop(row):
            self.references[block] -= 1
        del self.prefixes[row]

    def check_empty(self):
        assert self.held == {}
        assert self.references == [0] * self.num_blocks


class Paged(PagedMemory):
    """`PagedMemory`, with what the tests look at."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.committed = {}

    @property
    def held(self):
        return np.flatnonzero(self._rows.allocated).tolist()

    def commit(self, rows, lengths, tokens):
        super().commit(rows, lengths, tokens)
        for row, length in zip(rows.tolist(), lengths.tolist()):
            self.committed[row] = tokens[row, :length].tolist()
        self.check()

    def blocks(self, row):
        return self.tables.array[row].tolist()

    def check_empty(self):
        self.drain_copies()
        self.check()
        assert self.num_free == self.num_blocks
        assert self.host_pool is None or self.host_pool.num_free == self.host_pool.num_blocks


class Cache:
    """What a model would have in each slot of the blocks: the tokens up to its position and the salt.

    It knows nothing of keys and references. Copies come before a step. A step writes all its positions, then
    reads, as each layer does: what a row attends to must be what a step up to this one has written there for
    the same tokens.
    """

    def __init__(self, memory):
        self.memory = memory
        self.slots = {}
        self.host = {}

    def run(self, rows):
        """`rows` are (row, salt, first position, tokens with the drafts that run)."""
        self.copy_blocks()
        size = self.memory.block_size
        tables = {row: self.memory.blocks(row) for row, *_ in rows}
        written = [
            ((tables[row][position // size], position % size), (salt, tokens[: position + 1]))
            for row, salt, start, tokens in rows
            for position in range(start, len(tokens))
        ]
        assert len(dict(written)) == len(written), "two rows write to one slot"
        self.slots.update(written)
        for row, salt, _, tokens in rows:
            for position in range(len(tokens)):
                read = self.slots.get((tables[row][position // size], position % size))
                assert read == (salt, tokens[: position + 1]), "a row reads what no step has written"

    def copy_blocks(self):
        if not isinstance(self.memory, Paged):
            return
        copies = self.memory.drain_copies()
        for (sources, destinations), source, destination in (
            (copies.swap_out, self.slots, self.host),
            (copies.swap_in, self.host, self.slots),
        ):
            size = self.memory.block_size
            contents = [[source.get((block, offset)) for offset in range(size)] for block in sources.tolist()]
            for block, content in zip(destinations.tolist(), contents):
                destination.update(((block, offset), cell) for offset, cell in enumerate(content))


def token_at(handle, position):
    """The token every runner here samples at a position; it depends on both, so loss and repeats show."""
    return (handle * 31 + position * 7) % 97


def answer(request, max_model_len):
    """The tokens an undisturbed request gets after its prompt and why it ends, worked out one by one."""
    tokens = []
    size = len(request.prompt)
    while True:
        token = token_at(request.handle, size + len(tokens))
        tokens.append(token)
        if token in request.stop_ids and len(tokens) >= request.min_tokens:
            return tokens, Finish.STOP
        if len(tokens) == request.max_tokens or size + len(tokens) == max_model_len:
            return tokens, Finish.LENGTH


class Runner:
    """Applies plans to rows of its own, and samples `token_at`. It knows at once what it sampled itself.

    With a `Cache` it has every position written to its slot and read again. `salts` are by handle.
    """

    def __init__(self, cache, salts):
        self.rows = {}
        self.cache = cache
        self.salts = salts

    def run(self, plan):
        for row in plan.freed.tolist():
            del self.rows[row]
        for admitted in plan.admitted:
            assert admitted.row not in self.rows
            self.rows[admitted.row] = SimpleNamespace(
                handle=admitted.handle, tokens=admitted.tokens.tolist(), computed=admitted.num_cached
            )
        if self.cache:
            self.cache.run(self.cached_rows(plan))
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

    def cached_rows(self, plan):
        ends = np.cumsum(plan.num_drafts)
        for row, start, count, first, end in zip(
            *(column.tolist() for column in (*plan[1:4], ends - plan.num_drafts, ends))
        ):
            state = self.rows[row]
            tokens = (*state.tokens, *plan.drafts[first:end].tolist())
            yield row, self.salts[state.handle], start, tokens[: start + count]

    def verify(self, state, drafts):
        """Sample behind each draft up to the first that is wrong. Returns how many tokens that gave."""
        for number, draft in enumerate([*drafts, None], start=1):
            state.tokens.append(token_at(state.handle, len(state.tokens)))
            if state.tokens[-1] != draft:
                return number
            state.computed += 1
        raise AssertionError("the token after the last draft has no draft to agree with")


class Engine:
    """A scheduler, its memory and a runner; `generated` and `finished` are by handle."""

    def __init__(self, memory, *, policy=None, preemption=None, clock=None, **limits):
        self.memory = memory
        defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "watermark": 0}
        self.limits = Limits(**defaults | limits)
        clocks = {"clock": clock} if clock else {}
        self.scheduler = Scheduler(self.limits, memory, policy, preemption, **clocks)
        self.salts = {}
        self.cache = Cache(memory) if hasattr(memory, "blocks") else None
        self.runner = Runner(self.cache, self.salts)
        self.plans = deque()  # those in flight
        self.results = deque()  # and their results
        self.generated = {}
        self.finished = {}
        self.requests = {}

    def add(self, handle, prompt, max_tokens, **options):
        """`prompt` is a length, for tokens that no other handle shares, or the tokens."""
        if isinstance(prompt, int):
            prompt = [token_at(handle, position) for position in range(prompt)]
        request = Request(handle, np.array(prompt, np.int32), max_tokens, **options)
        self.scheduler.add(request)
        self.requests[handle] = request
        self.salts[handle] = tuple(request.extra)
        self.generated[handle] = request.generated.tolist()

    def draft(self, handle, right, wrong=0):
        """Draft tokens for a request that runs: first some right ones, then some wrong ones."""
        (row,) = (row for row, state in self.runner.rows.items() if state.handle == handle)
        known = len(self.runner.rows[row].tokens)
        drafts = [token_at(handle, position) for position in range(known, known + right)] + [-1] * wrong
        self.scheduler.draft(np.array([row]), np.array([drafts], np.int32))

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

    def plan(self, only=None):
        plan = self.scheduler.plan(only)
        assert not self.rows_in_flight() & {admitted.row for admitted in plan.admitted}
        if plan.rows.size:
            self.results.append(self.runner.run(plan))
            self.plans.append(plan)
        elif self.cache:
            self.cache.copy_blocks()
        return plan

    def rows_in_flight(self):
        return {row for plan in self.plans for row in plan.rows.tolist()}

    def commit(self):
        self.memory.committed = {}
        self.plans.popleft()
        committed = self.scheduler.commit(self.results.popleft())
        for row, tokens in self.memory.committed.items():
            assert tokens == self.runner.rows[row].tokens[: len(tokens)]
        for handle, token, finished, count in zip(
            *(column.tolist() for column in (committed.handles, committed.tokens, committed.finished)),
            committed.num_generated.tolist(),
        ):
            assert handle not in self.finished
            self.generated[handle].append(token)
            assert len(self.generated[handle]) == count
            if finished:
                self.finished[handle] = Finish(finished)
        return committed

    def step(self):
        """Plan and commit one step. Returns what ran, see `ran`."""
        ran = self.ran(self.plan())
        if self.results:
            self.commit()
        return ran

    def ran(self, plan):
        """{handle: (start, count)} of a plan's rows, with a third element "*" where they sample."""
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
        """Every request that was added and not aborted got the tokens of an undisturbed one."""
        for handle, request in self.requests.items():
            tokens, finish = answer(request, self.limits.max_model_len)
            assert self.generated[handle] == tokens
            assert self.finished[handle] == finish
        self.memory.check_empty()


@pytest.fixture
def engine():
    """Makes an engine: `engine(num_blocks, block_size=4, prefix_cache=False, host_blocks=None, **limits)`.

    With `host_blocks` it swaps. With `paged` its memory is kvblocks'.
    """

    def make(
        num_blocks, block_size=4, prefix_cache=False, host_blocks=None, paged=False, max_num_seqs=4, **options
    ):
        if paged:
            memory = Paged(
                num_blocks=num_blocks,
                block_size=block_size,
                max_rows=max_num_seqs,
                max_blocks_per_row=-(-options.get("max_model_len", 64) // block_size),
                host_blocks=host_blocks or 0,
            )
        elif host_blocks is not None:
            memory = SwapMemory(num_blocks, block_size, host_blocks)
        else:
            memory = (PrefixMemory if prefix_cache else CountingMemory)(num_blocks, block_size)
        preemption = None if host_blocks is None else Swap()
        return Engine(memory, preemption=preemption, max_num_seqs=max_num_seqs, **options)

    return make


@pytest.fixture
def engine_on():
    """Makes an engine on a memory of the test's own: `engine_on(memory, **limits)`."""
    return Engine


@pytest.fixture
def undisturbed():
    """`undisturbed(request, max_model_len)`: the tokens it gets when it runs alone, and why it ends."""
    return answer
