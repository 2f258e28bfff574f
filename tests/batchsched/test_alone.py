"""A step that runs one request alone, while others keep their rows and blocks."""

import pytest

from batchsched import Priority, TimeSlice


def test_a_running_row_alone(engine):
    e = engine(num_blocks=16)
    for handle in range(3):
        e.add(handle, prompt=2, max_tokens=4)
    e.step()
    assert e.ran(e.plan(only=1)) == {1: (2, 1, "*")}
    e.commit()
    assert e.step() == {0: (2, 1, "*"), 1: (3, 1, "*"), 2: (2, 1, "*")}
    e.drain()
    e.check_answers()


def test_it_is_admitted_before_all_that_wait(engine):
    e = engine(num_blocks=16)
    for handle in range(3):
        e.add(handle, prompt=2, max_tokens=4)
    assert e.ran(e.plan(only=2)) == {2: (0, 2, "*")}
    e.commit()
    assert e.step() == {0: (0, 2, "*"), 1: (0, 2, "*"), 2: (2, 1, "*")}


def test_on_hold_it_runs_in_steps_of_its_own_alone_until_it_is_released(engine):
    e = engine(num_blocks=16, max_num_batched_tokens=4)
    e.add(0, prompt=2, max_tokens=9)
    e.add(1, prompt=6, max_tokens=4, held=True)
    assert e.step() == {0: (0, 2, "*")}
    assert e.ran(e.plan(only=1)) == {1: (0, 4)}
    e.commit()
    assert e.step() == {0: (2, 1, "*")}
    assert e.ran(e.plan(only=1)) == {1: (4, 2, "*")}
    e.commit()
    assert e.step() == {0: (3, 1, "*")}
    assert e.scheduler.load().preemptions == 0
    assert e.scheduler.release(1)
    assert e.step() == {0: (4, 1, "*"), 1: (6, 1, "*")}
    e.drain()
    e.check_answers()


def test_rows_on_hold_are_no_deadlock(engine):
    """The ordinary request waits for blocks that the one on hold has; that is no reason to raise."""
    e = engine(num_blocks=4)
    e.add(0, prompt=12, max_tokens=3, held=True)
    e.add(1, prompt=8, max_tokens=2)
    e.plan(only=0)
    e.commit()
    assert e.step() == {}
    assert e.ran(e.plan(only=0)) == {0: (12, 1, "*")}
    e.commit()
    e.scheduler.release(0)
    e.drain()
    e.check_answers()


def test_rows_ranked_after_it_are_preempted_for_its_admission(engine):
    now = 0.0
    e = engine(num_blocks=4, clock=lambda: now)
    e.add(0, prompt=4, max_tokens=9, held=True)
    for now in (1.0, 2.0):
        e.add(int(now), prompt=5, max_tokens=7)
    assert set(e.step()) == {1, 2}
    assert e.ran(e.plan(only=0)) == {0: (0, 4, "*")}
    e.commit()
    assert e.scheduler.load().preemptions == 1
    assert set(e.step()) == {1}
    e.scheduler.release(0)
    e.drain()
    e.check_answers()


def test_it_waits_for_rows_ranked_before_it(engine):
    now = 0.0
    e = engine(num_blocks=4, clock=lambda: now)
    e.add(1, prompt=12, max_tokens=3)
    now = 1.0
    e.add(0, prompt=4, max_tokens=5, held=True)
    e.step()
    assert set(e.step()) == {1}
    assert e.ran(e.plan(only=0)) == {}
    assert e.scheduler.load().preemptions == 0
    assert set(e.step()) == {1}
    assert e.finished.keys() == {1}
    assert e.ran(e.plan(only=0)) == {0: (0, 4, "*")}
    e.commit()
    e.scheduler.release(0)
    e.drain()
    e.check_answers()


@pytest.mark.parametrize("policy", [Priority, lambda: TimeSlice(2)])
@pytest.mark.parametrize("memory", [{}, {"host_blocks": 2}, {"prefix_cache": True}], ids=str)
@pytest.mark.parametrize("stages", [1, 2])
def test_with_other_policies_swap_and_stages(engine, policy, memory, stages):
    e = engine(num_blocks=5, policy=policy(), stages=stages, max_num_batched_tokens=5, **memory)
    for handle in range(6):
        e.add(handle, prompt=3 + handle, max_tokens=8, priority=handle % 3, held=handle % 2 == 0)
    released = set()
    for handle in (0, 2, 4):
        steps = 0
        while not e.generated[handle]:
            assert e.ran(e.plan(only=handle)).keys() <= {handle}
            while e.plans:
                e.commit()
            assert not {0, 2, 4} & e.ran(e.plan()).keys() - released
            while e.plans:
                e.commit()
            steps += 1
            assert steps < 200, "it starves"
        e.scheduler.release(handle)
        released.add(handle)
    e.drain(depth=stages - 1)
    e.check_answers()


def test_one_that_is_unknown_or_paused_runs_nothing(engine):
    e = engine(num_blocks=4)
    assert e.plan(only=7).rows.size == 0
    e.add(0, prompt=2, max_tokens=2)
    e.scheduler.pause()
    assert e.plan(only=0).rows.size == 0
    e.scheduler.resume()
    e.drain()
    e.check_answers()


def test_steps_in_flight_are_waited_for_where_it_needs_their_room(engine):
    now = 0.0
    e = engine(num_blocks=4, max_num_seqs=1, clock=lambda: now)
    e.add(0, prompt=4, max_tokens=5, held=True)
    now = 1.0
    e.add(1, prompt=4, max_tokens=5)
    assert set(e.ran(e.plan())) == {1}
    assert e.ran(e.plan(only=0)) == {}
    e.commit()
    assert e.ran(e.plan(only=0)) == {0: (0, 4, "*")}
    e.commit()
    e.scheduler.release(0)
    e.drain()
    e.check_answers()


def test_it_raises_where_something_else_holds_the_memory(engine):
    e = engine(num_blocks=4)
    e.memory.held[99] = 2
    e.add(0, prompt=12, max_tokens=3, held=True)
    with pytest.raises(RuntimeError, match="2 of 4 are free"):
        e.plan(only=0)


def test_another_on_hold_makes_room(engine):
    """Of one rank, as first come, first served gives: only steps of its own would ever end it."""
    e = engine(num_blocks=4, max_num_seqs=1)
    for handle in range(2):
        e.add(handle, 2, max_tokens=3, held=True)
    e.plan(only=1)
    e.commit()
    assert e.ran(e.plan(only=0)) == {0: (0, 2, "*")}
    assert e.scheduler.load().held == 1
