"""A request resumed with tokens generated elsewhere goes on as if it had never been disturbed."""

import numpy as np
import pytest

from batchsched import Finish, ShortestFirst, StepResult


def run_alone(e, handle):
    """Run a request's last steps alone. Returns (token, finish, number generated) of each commit's tokens."""
    seen = []
    while e.scheduler.has_unfinished:
        e.plan()
        done = e.commit()
        assert set(done.handles.tolist()) == {handle}
        seen += zip(done.tokens.tolist(), done.finished.tolist(), done.num_generated.tolist())
    return seen


UNDISTURBED = [(14, Finish.NO, 1), (21, Finish.NO, 2), (28, Finish.NO, 3), (35, Finish.NO, 4)]
"""Handle 0 after 2 prompt tokens."""
ENDINGS = {
    "length": ({"max_tokens": 5}, [(42, Finish.LENGTH, 5)]),
    "context": ({"max_tokens": 50, "max_model_len": 7}, [(42, Finish.LENGTH, 5)]),
    "stop id": ({"max_tokens": 9, "stop_ids": (42,)}, [(42, Finish.STOP, 5)]),
    "stop id after min_tokens": (
        {"max_tokens": 9, "stop_ids": (28, 35, 49), "min_tokens": 5},
        [(42, Finish.NO, 5), (49, Finish.STOP, 6)],
    ),
}


@pytest.mark.parametrize("resumed_at", range(5))
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_rest_is_that_of_an_undisturbed_run(engine, ending, resumed_at):
    options, end = ENDINGS[ending]
    options = dict(options)
    e = engine(num_blocks=8, max_model_len=options.pop("max_model_len", 64))
    expected = UNDISTURBED + end
    e.add(0, prompt=2, generated=[token for token, _, _ in expected[:resumed_at]], **options)
    assert run_alone(e, 0) == expected[resumed_at:]


def test_its_tokens_are_known_and_counted_from_the_prompts_end(engine):
    e = engine(num_blocks=8)
    e.add(0, prompt=2, max_tokens=5, generated=[14, 21, 28])
    assert e.scheduler.load().waiting_tokens == 5
    plan = e.plan()
    (admitted,) = plan.admitted
    assert (admitted.tokens.tolist(), admitted.num_prompt) == ([0, 7, 14, 21, 28], 2)
    assert (admitted.resumed, admitted.num_cached) == (False, 0)
    assert e.ran(plan) == {0: (0, 5, "*")}


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    "memory", [{}, {"prefix_cache": True}, {"host_blocks": 4}], ids=["plain", "prefix cache", "host tier"]
)
def test_with_preemption_and_drafts_of_some(engine, undisturbed, memory, depth):
    """Requests resumed at every point share a memory too small for all of them."""
    e = engine(num_blocks=7, max_num_seqs=4, max_model_len=24, **memory)
    for handle in range(12):
        options = {
            "prompt": 1 + handle % 5,
            "max_tokens": 16,
            "stop_ids": (handle,),
            "max_drafts": handle % 3,
        }
        e.add(handle, **options)
        tokens, _ = undisturbed(e.requests[handle], e.limits.max_model_len)
        assert e.scheduler.abort(handle)
        e.add(handle, **options, generated=tokens[: handle % len(tokens)])
    while e.scheduler.has_unfinished or e.plans:
        for handle in e.may_draft():
            e.draft(handle, right=handle % 2, wrong=e.requests[handle].max_drafts - handle % 2)
        while len(e.plans) <= depth and e.plan().rows.size:
            pass
        e.commit()
    assert e.scheduler.load().preemptions > 0
    e.check_answers()


def test_a_run_cut_at_any_step_and_resumed_elsewhere(engine, undisturbed):
    """Every request of a busy engine moves to another one, with the tokens that were committed."""
    for steps in range(1, 12):
        first, second = (engine(num_blocks=8, max_num_batched_tokens=9) for _ in range(2))
        for handle in range(5):
            first.add(handle, prompt=2 + handle, max_tokens=6, stop_ids=(35,), min_tokens=2)
        for _ in range(steps):
            first.step()
        for handle in set(first.requests) - set(first.finished):
            second.add(
                handle,
                prompt=2 + handle,
                max_tokens=6,
                stop_ids=(35,),
                min_tokens=2,
                generated=first.generated[handle],
            )
        second.drain()
        second.check_answers()
        assert first.finished.keys() | second.finished.keys() == set(range(5))


def test_it_finds_its_prefix_and_reports_cached_prompt_tokens_only(engine):
    e = engine(num_blocks=16, prefix_cache=True)
    e.add(0, prompt=6, max_tokens=9)
    e.drain()  # 14 tokens are computed: 3 blocks
    e.add(1, prompt=e.requests[0].prompt.tolist(), max_tokens=9, generated=e.generated[0][:7])
    plan = e.plan()
    assert plan.admitted[0].num_cached == 12
    sampled = np.array([5], np.int32)
    committed = e.scheduler.commit(StepResult(plan.step, sampled))
    assert (committed.num_cached.tolist(), committed.num_generated.tolist()) == ([6], [8])


def test_the_shortest_first_ranks_it_as_undisturbed(engine):
    e = engine(num_blocks=16, max_num_seqs=1, policy=ShortestFirst(), clock=lambda: 0.0)
    e.add(1, prompt=4, max_tokens=8, generated=[59, 66, 73, 80])
    e.add(2, prompt=4, max_tokens=7)
    e.drain()
    assert list(e.finished) == [2, 1]
