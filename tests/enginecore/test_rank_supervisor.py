"""Ranks are watched and started again; their cores are scripts here."""

import os
import queue
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from enginecore.config import make_config
from enginecore.core import rank_process, supervisor
from enginecore.core.board import Progress
from enginecore.core.supervisor import RankSupervisor, step_timeout
from enginecore.messages import Loading, RankDown, RankLoading, RankOut, RankUp

LIMIT_S = 60
"""Seconds after which an event is given up, on the slowest machine."""
UP = "ready(); serve()"


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Returns a function that starts ranks with scripts by name, and the queue of their ups and downs."""
    command = (sys.executable, str(Path(__file__).with_name("fake_core.py")), str(tmp_path))
    monkeypatch.setattr(rank_process, "COMMAND", command)
    started: list[RankSupervisor] = []

    def begin(scripts, *, listened=True, **options):
        for name, script in scripts.items():
            (tmp_path / name).write_text(script)
        ranks = RankSupervisor(make_config({"model": "m", "device": "cpu", **options}))
        started.append(ranks)
        events: queue.Queue = queue.Queue()
        if listened:
            ranks.listen(changes(events.put))
        return ranks, lambda: events.get(timeout=LIMIT_S)

    yield begin
    for ranks in started:
        ranks.stop()


def changes(put):
    """Returns a listener that passes on ups and downs, without the progress between them."""
    return lambda event: None if isinstance(event, RankLoading) else put(event)


def wait_until(condition):
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_rank_is_up_with_its_address_and_limits(start):
    ranks, event = start({"all": UP})
    up = event()
    assert isinstance(up, RankUp)
    assert (up.rank, up.incarnation, up.limits.num_blocks) == (0, 0, 8)
    assert up.address.startswith(f"ipc://{ranks.folder}/")
    [pid] = ranks.pids
    ranks.stop()
    assert not psutil.pid_exists(pid)
    assert not ranks.folder.exists()


def test_the_progress_of_each_start_is_told(start, tmp_path):
    os.mkfifo(tmp_path / "gate")
    phases = [Loading("importing libraries"), Loading("reading weights", 3, 4)]
    wait = "Path(sys.argv[1], 'gate').read_bytes()"
    script = "; ".join(f"load({one.phase!r}, {one.done}, {one.total}); {wait}" for one in phases)
    ranks, _ = start({"0-0": f"{script}; ready(); die()", "0-1": UP}, listened=False)
    told: queue.Queue = queue.Queue()
    ranks.listen(told.put)
    starting = told.get(timeout=LIMIT_S)
    assert starting == RankLoading(0, 0, starting.began, Loading("starting the engine"))
    assert 0 < starting.began <= time.monotonic()
    for phase in phases:
        assert told.get(timeout=LIMIT_S) == RankLoading(0, 0, starting.began, phase)
        (tmp_path / "gate").write_bytes(b"go on")
    rest = [told.get(timeout=LIMIT_S) for _ in range(4)]
    assert [type(event) for event in rest] == [RankUp, RankDown, RankLoading, RankUp]
    assert (rest[2].incarnation, rest[2].progress) == (1, Loading("starting the engine"))
    assert rest[2].began > starting.began


def test_events_before_anyone_listens_are_told_in_order(start):
    ranks, _ = start({"0-0": "ready(); die()", "0-1": UP}, listened=False)
    wait_until(lambda: bool(ranks._ranks[0].place.incarnation and ranks._ranks[0].is_up))
    late: queue.Queue = queue.Queue()
    ranks.listen(changes(late.put))
    assert [type(late.get(timeout=LIMIT_S)) for _ in range(3)] == [RankUp, RankDown, RankUp]


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("die()", "the engine process ended, killed by signal 9"),
        ("fail('the engine has ended: no memory')", "the engine has ended: no memory"),
        ("sys.exit(7)", "the engine process ended, exit code 7"),
    ],
)
def test_a_rank_that_ends_is_started_again_as_it_was(start, end, said):
    """It has the first start's blocks and length, though another number of blocks would fit now."""
    suspects = "board.begin_step([np.array([(2 << 40) + 5, 6])], 1, alone=False); "
    _, event = start({"0-0": f"ready(num_blocks=8); {suspects}{end}", "0-1": "ready(num_blocks=3); serve()"})
    first, down, second = event(), event(), event()
    assert down == RankDown(0, 0, said, [(2, 5), (0, 6)], alone=False)
    assert (second.rank, second.incarnation) == (0, 1)
    assert second.address != first.address
    assert second.limits == first.limits


def test_a_rank_that_cannot_load_is_given_up_at_once(start):
    _, event = start({"all": "fail('there is no folder m')"})
    assert event() == RankOut(0, "there is no folder m", ever_up=False)


def test_a_core_that_ends_while_it_loads_says_so(start):
    _, event = start({"all": "die()"})
    assert event() == RankOut(0, "the engine process ended while starting, killed by signal 9", ever_up=False)


def test_without_restarts_the_cause_is_told(start):
    ranks, event = start({"all": "ready(); steps(200); fail('why')"}, max_rank_restarts=0)
    assert [type(event()), event().reason, event()] == [RankUp, "why", RankOut(0, "why")]
    assert ranks.pids == []


def test_early_ends_are_borne_so_often_and_later_ones_always(start):
    early = "ready(); steps(99); fail('early')"
    late = "ready(); steps(100); fail('late')"
    _, event = start({"all": early, "0-1": late, "0-2": late, "0-3": late}, max_rank_restarts=2)
    events = [event() for _ in range(13)]
    downs = [event.reason for event in events if isinstance(event, RankDown)]
    assert downs == ["early", "late", "late", "late", "early", "early"]
    assert events[-1] == RankOut(0, "early (the last of 3 early ends in 5 minutes)")


FAILS = "ready(); steps(100); fail('policy', in_scheduling=True)"


def test_a_scheduling_policy_that_soon_fails_again_is_given_up(start):
    _, event = start({"all": FAILS, "0-1": "ready(); die()"})
    events = [event() for _ in range(7)]
    assert [type(event) for event in events] == [RankUp, RankDown] * 3 + [RankOut]
    assert events[-1] == RankOut(0, "policy (the second time within 60 s)")


def test_a_scheduling_policy_that_fails_now_and_then_is_borne(start, monkeypatch):
    monkeypatch.setattr(supervisor, "_SCHEDULING_WINDOW", 0.0)
    _, event = start({"all": FAILS, "0-9": UP})
    assert [type(event()) for _ in range(19)] == [RankUp, RankDown] * 9 + [RankUp]


def test_early_ends_of_long_ago_do_not_count(start, monkeypatch):
    monkeypatch.setattr(supervisor, "_WINDOW", -1.0)
    _, event = start({"all": "ready(); die()", "0-4": UP}, max_rank_restarts=1)
    events = [event() for _ in range(9)]
    assert [type(event) for event in events] == [RankUp, RankDown] * 4 + [RankUp]


def test_a_trial_of_one_request_does_not_count(start):
    trial = "ready(); board.begin_step([np.array([4])], 1, alone=True); die()"
    _, event = start({"all": trial, "0-3": UP}, max_rank_restarts=1)
    events = [event() for _ in range(7)]
    assert [type(event) for event in events] == [RankUp, RankDown] * 3 + [RankUp]
    assert all(event.alone and event.suspects == [(0, 4)] for event in events[1::2])


def test_a_rank_that_hangs_is_killed_and_started_again(start):
    _, event = start({"0-0": "ready(); hang()", "0-1": UP}, step_timeout=0.5)
    assert isinstance(event(), RankUp)
    down = event()
    assert down.reason.startswith("the engine process made no progress for ")
    assert down.reason.endswith(" s, and was killed")
    assert event().incarnation == 1


def test_loading_is_no_hang(start):
    # While it loads a core's loop does not go round: longer here than the timeout.
    slow = "import time; time.sleep(1.5); ready(); serve()"
    _, event = start({"all": slow}, step_timeout=0.2)
    assert event().incarnation == 0


def test_stop_while_a_model_loads(start):
    ranks, _ = start({"all": "hang()"}, data_parallel_size=2)
    processes = [psutil.Process(pid) for pid in ranks.pids]
    ranks.stop()
    assert len(processes) == 2
    assert not any(process.is_running() for process in processes)


def test_independent_ranks_end_and_start_by_themselves(start):
    ranks, event = start({"all": UP, "1-0": "ready(); die()"}, data_parallel_size=2)
    events = [event() for _ in range(4)]
    assert [event.incarnation for event in events if event.rank == 0] == [0]
    assert [type(event) for event in events if event.rank == 1] == [RankUp, RankDown, RankUp]
    assert len(ranks.pids) == 2
    assert {rank: path.exists() for rank, path in ranks.boards.items()} == {0: True, 1: True}


def test_ranks_in_lockstep_end_and_start_together(start):
    together = "ready(lockstep=True); "
    _, event = start(
        {
            "all": together + "serve()",
            "1-0": together
            + "board.begin_step([np.array([4])], 1, alone=False); import time"
            + "\nwhile not (folder / 'go').exists(): board.beat(); time.sleep(0.01)\n"
            + "fail('broken')",
        },
        data_parallel_size=2,
        enable_expert_parallel=True,
    )
    assert {event().rank, event().rank} == {0, 1}
    Path(rank_process.COMMAND[2], "go").touch()
    downs = [event(), event()]
    assert downs[0] == RankDown(1, 0, "broken", [(0, 4)], alone=False)
    assert downs[1].rank == 0
    assert downs[1].reason == "rank 1, with which it shares experts, has ended: broken"
    assert downs[1].suspects == []
    ups = [event(), event()]
    assert {(up.rank, up.incarnation) for up in ups} == {(0, 1), (1, 1)}


def test_workers_that_stay_are_ended_before_the_rank_starts_again(start, monkeypatch):
    monkeypatch.setattr(rank_process, "_SECONDS_TO_END", 0.2)
    worker = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        _, event = start({"0-0": f"ready(pids=({worker.pid},)); die()", "0-1": UP})
        assert [type(event()) for _ in range(3)] == [RankUp, RankDown, RankUp]
        assert worker.wait(LIMIT_S) == -9
    finally:
        worker.kill()
        worker.wait()


def test_a_coordinator_that_ends_is_started_again(start):
    ranks, event = start({"all": UP}, data_parallel_size=2)
    event(), event()
    first = ranks._coordinator
    psutil.Process(first.pid).kill()
    wait_until(lambda: ranks._coordinator is not first)
    assert psutil.pid_exists(ranks._coordinator.pid)
    assert len(ranks.pids) == 2


@pytest.mark.parametrize(
    ("steps", "longest", "slowest", "tokens", "limit"),
    [
        (0, 0.0, 0.0, 2048, 600.0),  # the first one may compile kernels
        (9, 0.1, 0.05, 1, 60.0),
        (9, 8.0, 0.05, 1, 80.0),
        (9, 0.1, 0.05, 2048, 1024.0),  # a long prompt after steps of single tokens
    ],
)
def test_a_step_has_the_time_of_the_slowest_for_as_many_tokens(steps, longest, slowest, tokens, limit):
    progress = Progress(1.0, steps, longest, slowest, tokens, alone=False)
    assert step_timeout(progress) == pytest.approx(limit)
