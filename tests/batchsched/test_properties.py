"""Random traffic against a plain scheduler, an object a request, and against what must always hold."""

from types import SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

SETTINGS = settings(max_examples=120, stateful_step_count=50, deadline=None, database=None)


class Model:
    """What the scheduler does, one request at a time, for a memory that counts blocks."""

    def __init__(self, limits, num_blocks, block_size):
        self.limits = limits
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.turn = 0
        self.waiting = []  # in order of turn, as is what runs
        self.running = []
        self.departing = []
        self.flights = []
        self.preemptions = 0

    def blocks(self, length):
        return -(-length // self.block_size)

    @property
    def free(self):
        return self.num_blocks - sum(each.blocks for each in self.running + self.departing)

    def add(self, handle, size, target, answer):
        self.turn += 1
        self.waiting.append(
            SimpleNamespace(
                handle=handle, turn=self.turn, known=size, target=target, answer=list(answer), alive=True
            )
        )

    def abort(self, handle):
        for each in self.waiting + self.running + self.departing:
            if each.handle == handle and each.alive:
                each.alive = False
                if each in self.waiting:
                    self.waiting.remove(each)
                elif each in self.running:
                    self.depart(each)

    def depart(self, each):
        self.running.remove(each)
        self.departing.append(each)
        self.sweep()

    def sweep(self):
        """Those that no flight has go: back to the queue if there is more to come for them."""
        for each in list(self.departing):
            if not any(each in [one for one, _, _ in flight] for flight in self.flights):
                self.departing.remove(each)
                if each.alive:
                    self.preemptions += 1
                    self.waiting = sorted([*self.waiting, each], key=lambda one: one.turn)

    def plan(self):
        budget = self.limits.max_num_batched_tokens
        wanted = []
        for each in self.running:
            count = min(each.expected - each.planned, self.limits.chunk, budget)
            budget -= count
            if count:
                wanted.append((each, count))
        step, short = self.with_blocks(wanted)
        for each, count in step:
            each.blocks = self.blocks(each.planned + count)
        if not short and not any(each.alive and each.expected < each.target for each in self.departing):
            step += self.admitted(self.limits.max_num_batched_tokens - sum(count for _, count in step))
        ran = [self.give(each, count) for each, count in step]
        if ran:
            self.flights.append([(each, each.planned, one[-1]) for (each, _), one in zip(step, ran)])
            for each, _ in step:
                if each.expected == each.target:
                    self.depart(each)
        return ran

    def with_blocks(self, wanted):
        def fitting(blocks):
            for index, (each, count) in enumerate(wanted):
                blocks -= self.blocks(each.planned + count) - each.blocks
                if blocks < 0:
                    return index
            return len(wanted)

        short = fitting(self.free) < len(wanted)
        while True:
            index = fitting(self.free + sum(each.blocks for each in self.departing))
            if index == len(wanted) or wanted[index][0] is self.running[-1]:
                break
            victim = self.running[-1]
            self.depart(victim)
            wanted = [(each, count) for each, count in wanted if each is not victim]
        stays = [self.blocks(each.planned + count) == each.blocks for each, count in wanted]
        runs = fitting(self.free)
        return [one for index, one in enumerate(wanted) if index < runs or stays[index]], short

    def admitted(self, budget):
        step = []
        while budget and self.waiting and len(self.running + self.departing) < self.limits.max_num_seqs:
            promised = sum(self.blocks(each.expected) - each.blocks for each in self.running)
            each = self.waiting[0]
            headroom = int(self.limits.headroom * len(self.running))
            if self.blocks(each.known) + promised + headroom > self.free:
                break
            count = min(each.known, self.limits.chunk, budget)
            budget -= count
            each.expected, each.planned, each.blocks = each.known, 0, self.blocks(count)
            self.running.append(self.waiting.pop(0))
            step.append((each, count))
        return step

    def give(self, each, count):
        start = each.planned
        each.planned += count
        samples = each.planned == each.expected
        each.expected += samples
        return each.handle, start, count, samples

    def commit(self):
        emitted = []
        for each, _, samples in self.flights.pop(0):
            if samples and each.alive:
                each.known += 1
                emitted.append((each.handle, each.answer.pop(0)))
                each.alive = bool(each.answer)
        for each in list(self.running):
            if not each.alive:
                self.depart(each)
        self.sweep()
        return emitted


def machine(engine, oracle, *, prefix_cache):
    """The state machine, on one of the two memories. There is a model to compare with but for prefix hits."""

    class Traffic(RuleBasedStateMachine):
        @initialize(
            num_blocks=st.integers(4, 12),
            max_num_seqs=st.integers(1, 5),
            budget=st.integers(1, 12) | st.just(64),
            threshold=st.sampled_from([0, 0, 1, 3]),
            headroom=st.sampled_from([0, 0, 0.5, 2]),
            max_model_len=st.integers(8, 20),
        )
        def start(self, num_blocks, max_num_seqs, budget, threshold, headroom, max_model_len):
            self.engine = engine(
                num_blocks,
                prefix_cache=prefix_cache,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                max_model_len=max_model_len,
                long_prefill_token_threshold=threshold,
                headroom=headroom,
            )
            self.model = None if prefix_cache else Model(self.engine.limits, num_blocks, 4)
            self.handles = 0
            self.turns = {}
            self.aborted = set()

        @rule(
            prompt=st.integers(1, 12),
            shared=st.integers(0, 2),
            max_tokens=st.integers(1, 12),
            stops=st.lists(st.integers(0, 96), max_size=12),
            min_tokens=st.integers(0, 3),
        )
        def add(self, prompt, shared, max_tokens, stops, min_tokens):
            limits, memory = self.engine.limits, self.engine.memory
            prompt = min(prompt, limits.max_model_len - 1)
            size = min(prompt + max_tokens, limits.max_model_len, memory.num_blocks * memory.block_size + 1)
            prompt = min(prompt, size - 1)
            handle = self.handles
            self.handles += 1
            self.engine.add(
                handle,
                # A third of the requests share what they can; the rest have prompts of their own.
                [*range(prompt)] if shared == 0 else prompt,
                size - prompt,
                stop_ids=stops,
                min_tokens=min(min_tokens, size - prompt),
            )
            self.turns[handle] = len(self.turns)
            if self.model:
                tokens, _ = oracle(self.engine.requests[handle], limits.max_model_len)
                self.model.add(handle, prompt, size, tokens)

        @precondition(lambda self: self.handles)
        @rule(data=st.data())
        def abort(self, data):
            handle = data.draw(st.integers(0, self.handles - 1))
            lives = handle not in self.aborted and handle not in self.engine.finished
            assert self.engine.scheduler.abort(handle) == lives
            if lives:
                self.aborted.add(handle)
                self.engine.requests.pop(handle)
            if self.model:
                self.model.abort(handle)

        @precondition(lambda self: len(self.engine.results) <= 2)
        @rule()
        def plan(self):
            self.planned()

        @precondition(lambda self: self.engine.results)
        @rule()
        def commit(self):
            self.committed()

        def planned(self):
            preemptions = self.engine.scheduler.load().preemptions
            plan = self.engine.plan()
            self.check_plan(plan)
            if self.engine.scheduler.load().preemptions > preemptions:
                assert plan.opened == []
            ran = [
                (self.engine.runner.rows[row].handle, start, count, samples)
                for row, start, count, samples in zip(*(column.tolist() for column in plan[1:5]))
            ]
            if self.model:
                assert ran == self.model.plan()
            return bool(ran)

        def check_plan(self, plan):
            limits = self.engine.limits
            assert plan.num_tokens <= limits.max_num_batched_tokens
            assert len(self.engine.runner.rows) <= limits.max_num_seqs
            assert all(plan.counts <= limits.chunk)
            turns = [self.turns[self.engine.runner.rows[row].handle] for row in plan.rows.tolist()]
            assert turns == sorted(turns)
            load = self.engine.scheduler.load()
            opened = [self.turns[opened.handle] for opened in plan.opened]
            unseen = set(self.engine.requests) - set(self.engine.finished) - self.in_rows()
            assert load.waiting == len(unseen)
            assert not opened or max(opened) < min((self.turns[handle] for handle in unseen), default=1 << 30)

        def in_rows(self):
            closed = set(self.engine.scheduler._closed)
            return {each.handle for row, each in self.engine.runner.rows.items() if row not in closed}

        def committed(self):
            committed = self.engine.commit()
            emitted = list(zip(committed.handles.tolist(), committed.tokens.tolist()))
            assert not self.aborted & set(committed.handles.tolist())
            if self.model:
                assert emitted == self.model.commit()

        @invariant()
        def the_model_agrees(self):
            if not self.model:
                return
            load = self.engine.scheduler.load()
            assert self.engine.memory.num_free == self.model.free
            assert load.waiting == len(self.model.waiting)
            assert load.waiting_tokens == sum(each.known for each in self.model.waiting)
            assert load.preemptions == self.model.preemptions

        def teardown(self):
            steps = 0
            while self.engine.scheduler.has_unfinished or self.engine.results:
                if not (len(self.engine.results) <= 1 and self.planned()):
                    self.committed()
                steps += 1
                assert steps < 10_000, "somebody starves"
            self.engine.check_answers()

    return Traffic


def test_traffic_on_counted_blocks(engine, oracle):
    run_state_machine_as_test(machine(engine, oracle, prefix_cache=False), settings=SETTINGS)


def test_traffic_on_shared_blocks(engine, oracle):
    run_state_machine_as_test(machine(engine, oracle, prefix_cache=True), settings=SETTINGS)
