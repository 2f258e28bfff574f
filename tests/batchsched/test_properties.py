"""Random traffic: invariants after every plan and commit, under each policy and on each memory."""

import numpy as np
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

SETTINGS = settings(max_examples=40, stateful_step_count=50, deadline=None, database=None)
AGEING = 4.0
POLICIES = {
    "fcfs": Fcfs,
    "priority": lambda: Priority(AGEING),
    "timeslice": lambda: TimeSlice(3),
    "shortest": lambda: ShortestFirst(AGEING),
}
MEMORIES = [
    {},
    {"prefix_cache": True},
    {"host_blocks": 0},
    {"host_blocks": 8},
    {"paged": True},
    {"paged": True, "host_blocks": 8},
]
RANKS = {
    "fcfs": lambda request, arrival: 0,
    "priority": lambda request, arrival: request.priority + arrival / AGEING,
    "shortest": lambda request, arrival: len(request.prompt) + request.max_tokens + AGEING * arrival,
}
"""The rank of a request for its whole life, equals by handle. Time slices have none: rows change places."""


def machine(engine, undisturbed, policy):
    """The state machine for a policy."""

    class Traffic(RuleBasedStateMachine):
        @initialize(
            memory=st.sampled_from(MEMORIES),
            num_blocks=st.integers(4, 12),
            max_num_seqs=st.integers(1, 5),
            budget=st.integers(1, 12) | st.just(64),
            threshold=st.sampled_from([0, 0, 1, 3]),
            watermark=st.sampled_from([0, 0, 0.5, 2]),
            max_model_len=st.integers(8, 20),
            stages=st.sampled_from([1, 1, 2, 3]),
        )
        def start(
            self, memory, num_blocks, max_num_seqs, budget, threshold, watermark, max_model_len, stages
        ):
            self.now = 0.0
            self.engine = engine(
                num_blocks,
                policy=POLICIES[policy](),
                clock=lambda: self.now,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                max_model_len=max_model_len,
                long_prefill_token_threshold=threshold,
                watermark=watermark,
                stages=stages,
                **memory,
            )
            self.num_requests = 0
            self.places = {}  # handle: its rank and arrival
            self.aborted = set()
            self.held = set()

        @rule(
            prompt=st.integers(1, 12),
            shared=st.booleans(),
            max_tokens=st.integers(1, 12),
            stops=st.lists(st.integers(0, 96), max_size=12),
            min_tokens=st.integers(0, 3),
            priority=st.integers(0, 3),
            max_drafts=st.sampled_from([0, 0, 1, 4]),
            held=st.sampled_from([False, False, False, True]),
            resumed=st.sampled_from([0, 0, 0, 1, 5]),
            use_cache=st.sampled_from([True, True, True, False]),
            salt=st.sampled_from([(), (), (), (("salt", b"x"),)]),
        )
        def add(
            self,
            prompt,
            shared,
            max_tokens,
            stops,
            min_tokens,
            priority,
            max_drafts,
            held,
            resumed,
            use_cache,
            salt,
        ):
            limits, memory = self.engine.limits, self.engine.memory
            # As long as memory and the context allow; the last token takes no block.
            size = min(prompt + max_tokens, limits.max_model_len, memory.num_blocks * memory.block_size + 1)
            prompt = min(prompt, size - 1)
            handle = self.num_requests
            self.num_requests += 1
            options = {
                "prompt": [*range(prompt)] if shared else prompt,
                "max_tokens": size - prompt,
                "stop_ids": stops,
                "min_tokens": min(min_tokens, size - prompt),
                "priority": priority,
                "max_drafts": max_drafts,
                "held": held,
                "use_cache": use_cache,
                "extra": salt,
            }
            self.engine.add(handle, **options)
            request = self.engine.requests[handle]
            tokens, _ = undisturbed(request, limits.max_model_len)
            if 0 < resumed < len(tokens):
                self.engine.scheduler.abort(handle)
                self.engine.add(handle, **options, generated=tokens[:resumed])
            if held:
                self.held.add(handle)
            if policy in RANKS:
                self.places[handle] = RANKS[policy](request, self.now), handle

        @rule(seconds=st.sampled_from([0.5, 1.0, 7.0]))
        def wait(self, seconds):
            self.now += seconds

        @precondition(lambda self: self.num_requests)
        @rule(data=st.data())
        def abort(self, data):
            handle = data.draw(st.integers(0, self.num_requests - 1))
            live = self.is_live(handle)
            assert self.engine.scheduler.abort(handle) == live
            if live:
                self.aborted.add(handle)
                del self.engine.requests[handle]

        @precondition(lambda self: self.num_requests)
        @rule(data=st.data(), held=st.sampled_from([False, False, True]))
        def hold(self, data, held):
            self.set_held(data.draw(st.integers(0, self.num_requests - 1)), held)

        def set_held(self, handle, held):
            scheduler = self.engine.scheduler
            assert (scheduler.hold if held else scheduler.release)(handle) == self.is_live(handle)
            (self.held.add if held else self.held.discard)(handle)

        @precondition(lambda self: len(self.engine.plans) <= 2)
        @rule(right=st.integers(0, 4), wrong=st.integers(0, 2))
        def plan(self, right, wrong):
            for handle in self.engine.may_draft():
                most = self.engine.requests[handle].max_drafts
                self.engine.draft(handle, min(right, most), min(wrong, max(most - right, 0)))
            self.plan_and_check()

        @precondition(lambda self: self.num_requests and len(self.engine.plans) <= 2)
        @rule(data=st.data())
        def plan_alone(self, data):
            self.plan_only(data.draw(st.integers(0, self.num_requests - 1)))

        def plan_only(self, handle):
            """Others keep what they have, but for those ranked after it, where it needs their room."""
            before = {row: state.handle for row, state in self.engine.runner.rows.items()}
            plan = self.plan_and_check(only=handle)
            in_rows = {before[row] for row in before.keys() - plan.freed.tolist()}
            ran = {self.engine.runner.rows[row].handle for row in plan.rows.tolist()}
            assert ran <= {handle}
            assert ran <= set(filter(self.is_live, ran))
            assert {each.handle for each in plan.admitted} <= ran - in_rows
            return plan.rows.size > 0

        @precondition(lambda self: self.engine.plans)
        @rule()
        def commit(self):
            committed = self.engine.commit()
            assert not self.aborted & set(committed.handles.tolist())

        def is_live(self, handle):
            return handle in self.engine.requests and handle not in self.engine.finished

        def plan_and_check(self, only=None):
            in_flight = list(self.engine.plans)
            plan = self.engine.plan(only)
            limits = self.engine.limits
            assert plan.num_tokens <= limits.max_num_batched_tokens
            assert (plan.counts <= limits.chunk).all()
            assert np.unique(plan.rows).size == plan.rows.size
            assert len(self.engine.runner.rows) <= limits.max_num_seqs
            if limits.stages > 1:
                sampling = {row for each in in_flight for row in each.rows[each.samples].tolist()}
                assert not sampling & set(plan.rows.tolist())
            if only is None:
                ran = {self.engine.runner.rows[row].handle for row in plan.rows.tolist()}
                assert not ran & self.held
                if self.places:
                    self.check_order(plan)
            return plan

        def check_order(self, plan):
            handles = [self.engine.runner.rows[row].handle for row in plan.rows.tolist()]
            places = [self.places[handle] for handle in handles]
            admitted = [self.places[each.handle] for each in plan.admitted]
            running = places[: len(places) - len(admitted)]
            assert running == sorted(running)
            assert admitted == sorted(admitted)
            in_rows = {state.handle for state in self.engine.runner.rows.values()}
            waiting = set(filter(self.is_live, self.places)) - in_rows - self.held
            assert all(self.places[handle] > place for handle in waiting for place in admitted)

        @invariant()
        def memory_is_kept_and_not_over_committed(self):
            memory = self.engine.memory
            assert 0 <= memory.num_free <= memory.num_blocks
            assert self.engine.rows_in_flight() <= set(memory.held)

        @invariant()
        def every_live_request_waits_or_runs(self):
            load = self.engine.scheduler.load()
            assert load.running + load.waiting == sum(map(self.is_live, range(self.num_requests)))
            assert load.held <= len(self.held)

        def teardown(self):
            steps = 0
            # First those that have a row, which they keep from the others while they are on hold.
            in_rows = {state.handle for state in self.engine.runner.rows.values()}
            for handle in sorted(filter(self.is_live, self.held), key=lambda handle: handle not in in_rows):
                # As an engine does: alone in every other step, with none beside it, for its next token.
                known = len(self.engine.generated[handle])
                while self.is_live(handle) and len(self.engine.generated[handle]) == known:
                    while self.engine.plans:
                        self.engine.commit()
                    if not (steps % 2 and self.plan_only(handle)):
                        self.plan_and_check()
                    steps += 1
                    assert steps < 3_000, "a request that runs alone starves"
                self.set_held(handle, False)
            for handle in sorted(self.held):
                self.set_held(handle, False)
            steps = 0
            while self.engine.scheduler.has_unfinished or self.engine.plans:
                if not (len(self.engine.plans) <= 1 and self.plan_and_check().rows.size):
                    self.engine.commit()
                steps += 1
                assert steps < 3_000, "a request starves"
            self.engine.check_answers()

    return Traffic


@pytest.mark.parametrize("policy", POLICIES)
def test_traffic(engine, undisturbed, policy):
    run_state_machine_as_test(machine(engine, undisturbed, policy), settings=SETTINGS)
