"""A front-end's view of loads: reports, its own requests since, restarts, and a coordinator that is away."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginecore.data_parallel.loads import LoadView
from enginecore.data_parallel.messages import ClockOffset, Snapshot

COLUMNS = "rank", "incarnation", "age", "waiting", "running", "free", "blocks"


def snapshot(at: float, *rows: tuple) -> Snapshot:
    """Rows of COLUMNS."""
    columns = list(zip(*rows)) if rows else [()] * len(COLUMNS)
    kinds = np.int32, np.int32, np.float32, np.int32, np.int32, np.int32, np.int32
    return Snapshot(at, *(np.array(column, kind) for column, kind in zip(columns, kinds)))


@pytest.fixture
def view():
    made = LoadView([4, 5])
    made.set_up(4, 0)
    made.set_up(5, 0)
    return made


def shown(view: LoadView, now: float) -> dict[str, list[int]]:
    loads = view.loads(now)
    return {name: getattr(loads, name).tolist() for name in ("waiting", "running", "sent")}


def test_loads_are_those_of_the_snapshot_for_the_ranks_of_this_front_end(view):
    view.update(snapshot(10, (3, 0, 0, 9, 9, 9, 9), (4, 0, 0, 1, 2, 30, 40), (5, 0, 0, 5, 6, 7, 8)), 100)
    loads = view.loads(100)
    assert loads.waiting.tolist() == [1, 5] and loads.running.tolist() == [2, 6]
    assert loads.free_blocks.tolist() == [30, 7] and loads.num_blocks.tolist() == [40, 8]
    assert view.choose(100) == 4


def test_a_request_counts_until_a_report_is_newer(view):
    view.update(snapshot(10, (4, 0, 0, 0, 0, 9, 9), (5, 0, 0, 0, 0, 9, 9)), 100)
    view.sent(4, 100.1)
    view.sent(4, 100.3)
    # Made at 100.2.
    view.update(snapshot(10.4, (4, 0, 0.2, 1, 0, 9, 9), (5, 0, 0, 0, 0, 9, 9)), 100.4)
    assert shown(view, 100.4) == {"waiting": [1, 0], "running": [0, 0], "sent": [1, 0]}
    view.update(snapshot(10.5, (4, 0, 0, 1, 1, 9, 9), (5, 0, 0, 0, 0, 9, 9)), 100.5)
    assert shown(view, 100.5)["sent"] == [0, 0]


def test_a_request_that_was_just_sent_may_not_have_been_read_yet(view):
    view.sent(4, 100.0)
    view.update(snapshot(10, (4, 0, 0, 0, 0, 9, 9)), 100.001)
    assert shown(view, 100.001)["sent"] == [1, 0]


def test_a_request_that_ends_between_two_reports_counts_no_more(view):
    view.update(snapshot(10, (4, 0, 0, 0, 0, 9, 9), (5, 0, 0, 0, 0, 9, 9)), 100)
    view.sent(4, 100.1)
    view.ended(4)
    assert shown(view, 100.1)["sent"] == [0, 0]


def test_while_the_coordinator_is_away_own_requests_count(view):
    view.update(snapshot(10, (4, 0, 0, 7, 7, 9, 9), (5, 0, 0, 0, 0, 9, 9)), 100)
    for _ in range(3):
        view.sent(5, 100.5)
    view.sent(4, 100.5)
    view.ended(5)
    assert shown(view, 102) == {"waiting": [7, 0], "running": [7, 0], "sent": [1, 2]}
    assert shown(view, 104) == {"waiting": [0, 0], "running": [0, 0], "sent": [1, 2]}
    assert view.choose(104) == 4


def test_own_requests_alone_spread_a_burst(view):
    chosen = []
    for _ in range(64):
        chosen.append(view.choose(100))
        view.sent(chosen[-1], 100)
    assert chosen.count(4) == chosen.count(5) == 32


def test_reports_of_another_start_of_the_rank_are_not_its_load(view):
    view.sent(4, 100)
    view.set_down(4)
    view.set_up(4, 1)
    assert view.open == {4: 0, 5: 0}
    view.update(snapshot(10, (4, 0, 0, 9, 9, 0, 9), (5, 0, 0, 2, 0, 9, 9)), 101)
    assert shown(view, 101)["waiting"] == [0, 2]
    view.update(snapshot(11, (4, 1, 0, 3, 0, 9, 9), (5, 0, 0, 2, 0, 9, 9)), 102)
    assert shown(view, 102)["waiting"] == [3, 2]


def test_a_rank_that_is_down_is_not_chosen(view):
    view.set_down(4)
    assert {view.choose(100) for _ in range(4)} == {5}
    view.set_down(5)
    assert view.choose(100) is None


def test_a_rank_that_has_not_reported_or_is_missing_counts_own_requests(view):
    view.sent(4, 100)
    view.sent(5, 100)
    view.update(snapshot(10, (4, 0, -1, 0, 0, 9, 9)), 101)
    assert shown(view, 101)["sent"] == [1, 1]
    view.update(snapshot(11), 102)
    assert shown(view, 102)["sent"] == [1, 1]


def test_front_ends_begin_at_different_ranks():
    first = []
    for frontend in range(4):
        view = LoadView(range(4), frontend)
        for rank in range(4):
            view.set_up(rank, 0)
        first.append(view.choose(0))
    assert first == [0, 1, 2, 3]


def test_a_message_that_waited_counts_from_when_it_was_sent():
    clock = ClockOffset()
    assert clock.local(1000.0, 5.0) == 5.0
    assert clock.local(1010.0, 15.0) == pytest.approx(15.0, abs=1e-4)
    assert clock.local(1020.0, 28.0) == pytest.approx(25.0, abs=1e-4)


@given(st.lists(st.sampled_from(["sent", "ended", "report", "away", "restart"]), max_size=60), st.randoms())
def test_a_rank_never_counts_more_unreported_requests_than_are_open(events, random):
    view = LoadView([0, 1])
    open_requests = {0: 0, 1: 0}
    incarnation = 0
    for rank in (0, 1):
        view.set_up(rank, 0)
    now = 100.0
    for event in events:
        now += random.choice([0.001, 0.02, 1.0])
        rank = random.choice([0, 1])
        if event == "sent":
            view.sent(rank, now)
            open_requests[rank] += 1
        elif event == "ended" and open_requests[rank]:
            view.ended(rank)
            open_requests[rank] -= 1
        elif event == "report":
            view.update(snapshot(now, (0, incarnation, 0.01, 1, 1, 5, 9), (1, 0, 0.5, 1, 1, 5, 9)), now)
        elif event == "away":
            now += 10
        elif event == "restart":
            incarnation += 1
            view.set_down(0)
            view.set_up(0, incarnation)
            open_requests[0] = 0
        loads = view.loads(now)
        assert view.open == open_requests
        assert all(0 <= sent <= count for sent, count in zip(loads.sent.tolist(), open_requests.values()))


def test_a_burst_spreads_evenly_though_one_rank_has_not_reported(view):
    view.update(snapshot(10, (4, 0, -1, 0, 0, 9, 9), (5, 0, 0, 0, 0, 9, 9)), 100)
    chosen = []
    for _ in range(64):
        chosen.append(view.choose(100.1))
        view.sent(chosen[-1], 100.1)
    assert chosen.count(4) == chosen.count(5) == 32
