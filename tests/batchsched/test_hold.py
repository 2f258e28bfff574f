"""Requests on hold are passed over, and keep their turn."""

import pytest


def test_one_on_hold_blocks_nobody(engine):
    e = engine(num_blocks=8, max_num_seqs=1)
    e.add(1, prompt=2, max_tokens=1, held=True)
    e.add(2, prompt=2, max_tokens=1)
    assert e.step() == {2: (0, 2, "*")}
    assert e.step() == {}
    assert e.scheduler.has_unfinished
    load = e.scheduler.load()
    assert (load.running, load.waiting, load.held, load.waiting_tokens) == (0, 1, 1, 2)


def test_it_keeps_its_turn(engine):
    e = engine(num_blocks=8, max_num_seqs=1)
    e.add(1, prompt=2, max_tokens=1, held=True)
    for handle in (2, 3, 4):
        e.add(handle, prompt=2, max_tokens=1)
    assert list(e.step()) == [2]
    assert e.scheduler.release(1)
    assert e.scheduler.load().held == 0
    e.drain()
    assert list(e.finished) == [2, 1, 3, 4]
    e.check_answers()


def test_one_that_waits_can_be_held_and_released_again_and_again(engine):
    e = engine(num_blocks=8, max_num_seqs=1)
    for handle in (1, 2):
        e.add(handle, prompt=2, max_tokens=1)
    for _ in range(100):
        assert e.scheduler.hold(1)
        assert e.scheduler.hold(1)
        assert e.scheduler.release(1)
        assert e.scheduler.release(1)
    assert e.scheduler.load().waiting == 2
    assert e.scheduler.hold(1)
    assert list(e.step()) == [2]
    e.scheduler.release(1)
    e.drain()
    e.check_answers()


@pytest.mark.parametrize("depth", [0, 1])
def test_one_that_runs_gives_its_row_up(engine, depth):
    e = engine(num_blocks=8)
    e.add(1, prompt=2, max_tokens=6)
    e.add(2, prompt=2, max_tokens=6)
    for _ in range(depth + 1):
        e.plan()
    assert e.scheduler.hold(1)
    while e.results:
        e.commit()
    assert e.scheduler.load()[:2] == (1, 1)
    assert list(e.step()) == [2]
    e.scheduler.release(1)
    assert list(e.step()) == [2, 1]
    e.drain(depth)
    e.check_answers()


def test_one_that_is_held_on_its_way_out_stays_out_and_may_be_released_first(engine):
    e = engine(num_blocks=8)
    e.add(1, prompt=2, max_tokens=6)
    e.plan()
    e.scheduler.hold(1)
    e.scheduler.release(1)
    e.commit()
    assert list(e.step()) == [1]
    e.drain()
    e.check_answers()


def test_one_whose_last_token_is_in_flight_ends(engine):
    e = engine(num_blocks=8)
    e.add(1, prompt=2, max_tokens=1)
    e.plan()
    assert e.scheduler.hold(1)
    e.commit()
    e.check_answers()
    assert not e.scheduler.has_unfinished


def test_one_on_hold_can_be_aborted(engine):
    e = engine(num_blocks=8)
    e.add(1, prompt=2, max_tokens=1, held=True)
    assert e.scheduler.abort(1)
    assert e.scheduler.load()[:3] == (0, 0, 0)
    assert not e.scheduler.has_unfinished


def test_nobody_is_held_who_is_not_there(engine):
    e = engine(num_blocks=8)
    assert not e.scheduler.hold(1)
    assert not e.scheduler.release(1)
