"""The board: what a core has noted there is read by others, and outlives it."""

import subprocess
import sys

import numpy as np

from enginecore.core.board import Board
from enginecore.messages import STEP_BOUNDS, EngineStats

ROWS = 6

DYING = """
import os, signal, sys
from pathlib import Path
import numpy as np
from enginecore.core.board import Board
from enginecore.messages import EngineStats
board = Board(Path(sys.argv[1]))
board.publish(EngineStats(running=2, generation_tokens=5))
board.begin_step([np.array([7])], 3, alone=False)
board.end_step([], 3, 1.5)
board.begin_step([np.array([7, 8]), np.array([9])], 4, alone=False)
os.kill(os.getpid(), signal.SIGKILL)
"""


def buckets(*steps: int) -> list[int]:
    """Counts of steps, the first ones given."""
    return [*steps, *[0] * (len(STEP_BOUNDS) + 1 - len(steps))]


def prepared(folder):
    Board.prepare(folder / "board", ROWS)
    return folder / "board"


def test_a_new_board_is_empty_and_private(tmp_path):
    path = prepared(tmp_path)
    board = Board(path)
    assert board.stats() == EngineStats()
    assert board.under_way() == []
    assert board.progress()[1:] == (0, 0.0, 0.0, 0, False)
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_a_killed_process_has_noted_is_read_afterwards(tmp_path):
    path = prepared(tmp_path)
    reader = Board(path)
    done = subprocess.run([sys.executable, "-c", DYING, str(path)], timeout=60, check=False)
    assert done.returncode == -9
    for board in (reader, Board(path)):
        assert board.under_way() == [7, 8, 9]
        assert board.progress()[1:] == (1, 1.5, 0.5, 4, False)
        assert board.stats() == EngineStats(running=2, generation_tokens=5)


def test_counters_go_on_with_the_next_core_and_all_else_begins_anew(tmp_path):
    path = prepared(tmp_path)
    reader = Board(path)
    for run in range(1, 4):
        Board.prepare(path, ROWS)
        assert reader.under_way() == []
        assert reader.progress()[1:] == (0, 0.0, 0.0, 0, False)
        assert (reader.stats().running, reader.stats().num_blocks) == (0, 0)
        core = Board(path)
        for tokens in (3, 10):
            # As the core counts them: from its own start.
            core.publish(
                EngineStats(
                    running=4,
                    waiting=1,
                    free_blocks=2,
                    num_blocks=8,
                    preemptions=1,
                    generation_tokens=tokens,
                    ran_tokens=2 * tokens,
                    num_accepted_tokens=tokens,
                    step_buckets=buckets(tokens, 1),
                )
            )
        core.begin_step([np.array([run])], 1, alone=True)
        stats = reader.stats()
        assert (stats.running, stats.waiting, stats.free_blocks, stats.num_blocks) == (4, 1, 2, 8)
        assert (stats.preemptions, stats.generation_tokens, stats.ran_tokens) == (run, 10 * run, 20 * run)
        assert stats.num_accepted_tokens == 10 * run
        assert stats.step_buckets == buckets(10 * run, run)


def test_steps_under_way(tmp_path):
    board = Board(prepared(tmp_path))
    first, second = np.array([1, 2, 3]), np.array([2, 4])
    board.begin_step([first], 1, alone=False)
    board.begin_step([first, second], 1, alone=False)
    assert board.under_way() == [1, 2, 3, 4]
    board.end_step([second], 1, 0.25)
    assert board.under_way() == [2, 4]
    board.end_step([], 1, 0.125)
    assert board.under_way() == []
    assert board.progress()[1:3] == (2, 0.25)


def test_a_full_board_holds_every_row(tmp_path):
    board = Board(prepared(tmp_path))
    board.begin_step([np.arange(3) + (5 << 40), np.arange(3)], 1, alone=False)
    assert board.under_way() == [5 << 40, (5 << 40) + 1, (5 << 40) + 2, 0, 1, 2]


def test_a_trial_is_told_while_it_runs(tmp_path):
    board = Board(prepared(tmp_path))
    board.begin_step([np.array([1])], 1, alone=True)
    assert board.progress().alone
    board.end_step([], 1, 0.0)
    assert not board.progress().alone


def test_a_beat_ends_idleness(tmp_path, monkeypatch):
    clock = iter([10**9, 4 * 10**9, 4 * 10**9, 6 * 10**9])
    monkeypatch.setattr("enginecore.core.board.time.monotonic_ns", lambda: next(clock))
    board = Board(prepared(tmp_path))
    assert board.progress().idle_seconds == 3.0
    board.beat()
    assert board.progress().idle_seconds == 2.0


def test_states_of_engines_add_up():
    one = EngineStats(running=1, free_blocks=2, num_blocks=8, prompt_tokens=5, step_buckets=buckets(1, 2))
    two = EngineStats(waiting=3, free_blocks=4, num_blocks=8, prompt_tokens=7, step_buckets=buckets(10, 20))
    both = one + two
    assert both == EngineStats(
        running=1, waiting=3, free_blocks=6, num_blocks=16, prompt_tokens=12, step_buckets=buckets(11, 22)
    )
    assert both.kv_cache_usage == 1 - 6 / 16
    assert (one.running, one.step_buckets) == (1, buckets(1, 2))
    assert EngineStats().kv_cache_usage == 0.0
