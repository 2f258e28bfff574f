"""Random traffic against a plain scheduler, an object a request, and against what must always hold."""

from types import SimpleNamespace

import pytest
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

from batchsched import Fcfs, Priority, ShortestFirst, TimeSlice

SETTINGS = settings(max_examples=60, stateful_step_count=60, deadline=None, database=None)
AGEING = 4.0
QUANTUM = 3
POLICIES = {
    "fcfs": Fcfs,
    "priority": lambda: Priority(AGEING),
    "timeslice": lambda: TimeSlice(QUANTUM),
    "shortest": lambda: ShortestFirst(AGEING),
}


class Plain:
    """The policies, said again."""

    def __init__(self, name):
        self.name = name
        self.quantum = QUANTUM if name == "timeslice" else None
        self.margin = {"priority": 0.5, "timeslice": 0.0}.get(name)
        self.tolerance = {"priority": 0.5, "shortest": AGEING}.get(name, 0)

    def rank(self, each, now):
        if self.name == "priority":
            return each.priority + now / AGEING
        if self.name == "shortest":
            return each.work + AGEING * now
        return each.turn

    def victim(self, candidates):
        worst = candidates[-1].rank - self.tolerance
        equals = [each for each in candidates if each.rank >= worst]
        least = min(each.planned for each in equals)
        return [each for each in equals if each.planned == least][-1]


class Model:
    """What the scheduler does, one request at a time, for a memory that counts blocks."""

    def __init__(self, limits, policy, num_blocks, block_size, host_blocks):
        self.limits = limits
        self.policy = Plain(policy)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.host_blocks = host_blocks
        self.turn = 0
        self.waiting = []  # in order of rank, as is what runs
        self.running = []
        self.departing = []
        self.flights = []
        self.preemptions = 0

    def blocks(self, length):
        return -(-length // self.block_size)

    @property
    def everyone(self):
        return self.waiting + self.running + self.departing

    @property
    def ready(self):
        return [each for each in self.waiting if not each.held]

    @property
    def free(self):
        return self.num_blocks - sum(each.blocks for each in self.running + self.departing)

    @property
    def coming(self):
        return sum(self.blocks(each.planned) for each in self.departing)

    @property
    def preempting(self):
        return any(each.alive and each.expected < each.target for each in self.departing)

    def ordered(self, some):
        return sorted(some, key=lambda each: (each.rank, each.turn))

    def add(self, request, target, answer, now):
        self.turn += 1
        each = SimpleNamespace(
            handle=request.handle,
            turn=self.turn,
            priority=request.priority,
            work=len(request.tokens) + request.max_tokens,
            known=len(request.tokens),
            target=target,
            answer=list(answer),
            held=request.held,
            max_drafts=request.max_drafts,
            alive=True,
            stored=0,
            drafts=[],
        )
        each.rank = self.policy.rank(each, now)
        self.waiting = self.ordered([*self.waiting, each])

    def find(self, handle):
        return next((each for each in self.everyone if each.handle == handle and each.alive), None)

    def abort(self, handle):
        each = self.find(handle)
        if each:
            each.alive = False
            each.stored = 0
            if each in self.waiting:
                self.waiting.remove(each)
            elif each in self.running:
                self.depart(each)

    def hold(self, handle, held):
        each = self.find(handle)
        if each:
            each.held = held
            if held and each in self.running:
                self.depart(each)

    def draft(self, handle, tokens):
        each = self.find(handle)
        if each in self.running:
            each.drafts = tokens[: max(each.target - each.known - 1, 0)]

    def depart(self, each):
        self.running.remove(each)
        self.departing.append(each)
        self.sweep()

    def sweep(self):
        """Those that no flight has go: back to the queue if there is more to come for them."""
        for each in list(self.departing):
            if not any(each is one for flight in self.flights for one, _, _ in flight):
                self.departing.remove(each)
                if each.alive:
                    self.preemptions += 1
                    stored = sum(self.blocks(one.stored) for one in self.waiting)
                    if stored + self.blocks(each.planned) <= self.host_blocks:
                        each.stored = each.planned
                    self.waiting = self.ordered([*self.waiting, each])

    def plan(self, now):
        if self.ready and not self.preempting:
            self.make_way(now)
        budget = self.limits.max_num_batched_tokens
        wanted = []
        turns = self.turns()
        for each in self.running:
            count = each.expected - each.planned + len(each.drafts)
            if (each.max_drafts and each.expected > each.known) or each.handle not in turns:
                count = 0
            count = min(count, self.limits.chunk, budget)
            budget -= count
            if count:
                wanted.append((each, count))
        step, short = self.with_blocks(wanted)
        for each, count in step:
            each.blocks = max(self.blocks(each.planned + count), each.blocks)
        if not short and not self.preempting:
            step += self.admitted(self.limits.max_num_batched_tokens - sum(count for _, count in step))
        ran = [self.give(each, count) for each, count in step]
        if ran:
            self.flights.append([(each, *one[-2:]) for (each, _), one in zip(step, ran)])
            for each, _ in step:
                if each.expected == each.target:
                    self.depart(each)
        return ran

    def turns(self):
        """Handles of the rows that a step may take."""
        stages = self.limits.stages
        if stages == 1:
            return [each.handle for each in self.running]
        decoding = [each for each in self.running if each.expected - each.planned <= 1]
        turns = [each.handle for each in self.running if each not in decoding]
        share = len(decoding) // stages
        in_flight = [
            sum(samples and one in self.running for one, samples, _ in flight) for flight in self.flights
        ]
        if len([size for size in in_flight if size > share]) < len(decoding) % stages:
            share += 1
        ready = [each.handle for each in decoding if each.expected == each.known]
        return turns + ready[:share]

    def make_way(self, now):
        if self.policy.quantum:
            for each in list(self.running):
                if each.expected - each.slice_start >= self.policy.quantum:
                    self.turn += 1
                    each.turn = self.turn
                    each.rank = self.policy.rank(each, now)
                    each.slice_start = each.expected
            self.running = self.ordered(self.running)
        if self.policy.margin is None:
            return
        first = self.ready[0]
        candidates = [each for each in self.running if each.rank > first.rank + self.policy.margin]
        gone, coming = [], self.coming
        everyone_gone = coming + sum(self.blocks(each.planned) for each in candidates)
        if not candidates or not self.has_room(first, candidates, everyone_gone):
            return
        while not self.has_room(first, gone, coming):
            victim = self.policy.victim([each for each in candidates if each not in gone])
            gone.append(victim)
            coming += self.blocks(victim.planned)
        for each in [each for each in candidates if each in gone]:
            self.depart(each)

    def has_room(self, first, gone, coming):
        staying = [each for each in self.running if each not in gone]
        return len(staying) < self.limits.max_num_seqs and self.fits(first, staying, coming)

    def fits(self, first, staying, coming):
        promised = sum(max(self.blocks(each.expected) - each.blocks, 0) for each in staying)
        headroom = int(self.limits.headroom * len(staying))
        return self.blocks(first.known) + promised + headroom <= self.free + coming

    def with_blocks(self, wanted):
        def fitting(blocks):
            for index, (each, count) in enumerate(wanted):
                blocks -= max(self.blocks(each.planned + count) - each.blocks, 0)
                if blocks < 0:
                    return index
            return len(wanted)

        if fitting(self.free) < len(wanted):
            wanted = [(each, min(count, each.expected - each.planned)) for each, count in wanted]
        short = fitting(self.free) < len(wanted)
        while True:
            index = fitting(self.free + self.coming)
            if index == len(wanted) or wanted[index][0] is self.running[-1]:
                break
            behind = self.running[self.running.index(wanted[index][0]) + 1 :]
            victim = self.policy.victim(behind)
            self.depart(victim)
            wanted = [(each, count) for each, count in wanted if each is not victim]
        stays = [self.blocks(each.planned + count) == self.blocks(each.planned) for each, count in wanted]
        runs = fitting(self.free)
        return [one for index, one in enumerate(wanted) if index < runs or stays[index]], short

    def admitted(self, budget):
        step = []
        while budget and self.ready and len(self.running + self.departing) < self.limits.max_num_seqs:
            each = self.ready[0]
            if not self.fits(each, self.running, 0):
                break
            count = min(each.known - each.stored, self.limits.chunk, budget)
            budget -= count
            each.expected = each.slice_start = each.known
            each.planned, each.stored, each.drafts = each.stored, 0, []
            each.blocks = self.blocks(each.planned + count)
            self.waiting.remove(each)
            self.running.append(each)
            step.append((each, count))
        self.running = self.ordered(self.running)
        return step

    def give(self, each, count):
        start = each.planned
        each.planned += count
        samples = each.planned >= each.expected
        drafts = each.drafts[: max(each.planned - each.expected, 0)]
        if samples:
            each.drafts = []
        each.expected += samples
        return each.handle, start, count, samples, drafts

    def commit(self):
        emitted = []
        for each, samples, drafts in self.flights.pop(0):
            if samples and each.alive:
                accepted = 0
                while drafts[accepted : accepted + 1] == each.answer[accepted : accepted + 1] != []:
                    accepted += 1
                tokens = each.answer[: accepted + 1]
                each.answer = each.answer[accepted + 1 :]
                each.known += len(tokens)
                emitted += [(each.handle, token) for token in tokens]
                each.alive = bool(each.answer)
                if drafts:
                    each.expected, each.planned = each.known, each.known - 1
        for each in list(self.running):
            if not each.alive:
                self.depart(each)
        self.sweep()
        return emitted


def machine(engine, oracle, policy, memory):
    """The state machine, for a policy on one of the memories. The model compares but for prefix hits."""

    class Traffic(RuleBasedStateMachine):
        @initialize(
            num_blocks=st.integers(4, 12),
            host_blocks=st.integers(0, 12),
            max_num_seqs=st.integers(1, 5),
            budget=st.integers(1, 12) | st.just(64),
            threshold=st.sampled_from([0, 0, 1, 3]),
            headroom=st.sampled_from([0, 0, 0.5, 2]),
            max_model_len=st.integers(8, 20),
            stages=st.sampled_from([1, 1, 2, 3]),
        )
        def start(
            self, num_blocks, host_blocks, max_num_seqs, budget, threshold, headroom, max_model_len, stages
        ):
            self.now = 0.0
            self.engine = engine(
                num_blocks,
                prefix_cache=memory == "prefix",
                host_blocks=host_blocks if memory == "swap" else None,
                policy=POLICIES[policy](),
                clock=lambda: self.now,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                max_model_len=max_model_len,
                long_prefill_token_threshold=threshold,
                headroom=headroom,
                stages=stages,
            )
            self.model = None
            if memory != "prefix":
                host_blocks = host_blocks if memory == "swap" else -1
                self.model = Model(self.engine.limits, policy, num_blocks, 4, host_blocks)
            self.handles = 0
            self.aborted = set()
            self.held = set()

        @rule(
            prompt=st.integers(1, 12),
            shared=st.integers(0, 2),
            max_tokens=st.integers(1, 12),
            stops=st.lists(st.integers(0, 96), max_size=12),
            min_tokens=st.integers(0, 3),
            priority=st.integers(0, 3),
            max_drafts=st.sampled_from([0, 0, 1, 4]),
            held=st.sampled_from([False, False, False, True]),
        )
        def add(self, prompt, shared, max_tokens, stops, min_tokens, priority, max_drafts, held):
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
                priority=priority,
                max_drafts=max_drafts,
                held=held,
            )
            if held:
                self.held.add(handle)
            if self.model:
                request = self.engine.requests[handle]
                tokens, _ = oracle(request, limits.max_model_len)
                self.model.add(request, size, tokens, self.now)

        @rule(seconds=st.sampled_from([0.5, 1.0, 7.0]))
        def wait(self, seconds):
            self.now += seconds

        @precondition(lambda self: self.handles)
        @rule(data=st.data())
        def abort(self, data):
            handle = data.draw(st.integers(0, self.handles - 1))
            lives = self.lives(handle)
            assert self.engine.scheduler.abort(handle) == lives
            if lives:
                self.aborted.add(handle)
                self.engine.requests.pop(handle)
            if self.model:
                self.model.abort(handle)

        @precondition(lambda self: self.handles)
        @rule(data=st.data(), held=st.sampled_from([False, False, True]))
        def hold(self, data, held):
            self.set_held(data.draw(st.integers(0, self.handles - 1)), held)

        def set_held(self, handle, held):
            scheduler = self.engine.scheduler
            assert (scheduler.hold if held else scheduler.release)(handle) == self.lives(handle)
            (self.held.add if held else self.held.discard)(handle)
            if self.model:
                self.model.hold(handle, held)

        @precondition(lambda self: self.engine.num_in_flight <= 2)
        @rule(right=st.integers(0, 4), wrong=st.integers(0, 2))
        def plan(self, right, wrong):
            for handle in self.engine.may_draft():
                most = self.engine.requests[handle].max_drafts
                tokens = self.engine.draft(handle, min(right, most), min(wrong, max(most - right, 0)))
                if self.model:
                    self.model.draft(handle, tokens)
            self.planned()

        @precondition(lambda self: self.engine.num_in_flight)
        @rule()
        def commit(self):
            self.committed()

        def lives(self, handle):
            return handle not in self.aborted and handle not in self.engine.finished

        def planned(self):
            plan = self.engine.plan()
            self.check_plan(plan)
            drafts, ran = plan.drafts.tolist(), []
            for row, start, count, samples, drafted in zip(
                *(column.tolist() for column in plan[1:5]), plan.num_drafts.tolist()
            ):
                handle = self.engine.runner.rows[row].handle
                ran.append((handle, start, count, samples, [drafts.pop(0) for _ in range(drafted)]))
            if self.model:
                assert ran == self.model.plan(self.now)
            return bool(ran)

        def check_plan(self, plan):
            limits = self.engine.limits
            assert plan.num_tokens <= limits.max_num_batched_tokens
            assert len(self.engine.runner.rows) <= limits.max_num_seqs
            assert all(plan.counts <= limits.chunk)
            if limits.stages > 1:
                *earlier, _ = self.engine.plans if plan.rows.size else [*self.engine.plans, plan]
                sampling = {row for flight in earlier for row in flight.rows[flight.samples].tolist()}
                assert not sampling & set(plan.rows.tolist())
            unseen = {handle for handle in self.engine.requests if self.lives(handle)} - self.in_rows()
            assert self.engine.scheduler.load().waiting == len(unseen)
            if policy == "fcfs":
                handles = [self.engine.runner.rows[row].handle for row in plan.rows.tolist()]
                opened = [opened.handle for opened in plan.opened]
                running = handles[: len(handles) - len(opened)]
                assert (running, opened) == (sorted(running), sorted(opened))
                assert not opened or max(opened) < min(unseen - self.held, default=1 << 30)

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
            assert load.held == len(self.model.waiting) - len(self.model.ready)
            assert load.waiting_tokens == sum(each.known for each in self.model.waiting)
            assert load.preemptions == self.model.preemptions

        def teardown(self):
            for handle in sorted(self.held):
                self.set_held(handle, False)
            steps = 0
            while self.engine.scheduler.has_unfinished or self.engine.num_in_flight:
                if not (self.engine.num_in_flight <= 1 and self.planned()):
                    self.committed()
                steps += 1
                assert steps < 10_000, "somebody starves"
            self.engine.check_answers()

    return Traffic


@pytest.mark.parametrize("memory", ["counted", "swap", "prefix"])
@pytest.mark.parametrize("policy", POLICIES)
def test_traffic(engine, oracle, policy, memory):
    run_state_machine_as_test(machine(engine, oracle, policy, memory), settings=SETTINGS)
