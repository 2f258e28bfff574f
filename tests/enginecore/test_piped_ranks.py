"""Ups and downs of ranks that come through a pipe."""

import os
import threading
from pathlib import Path

import msgspec

from enginecore.core.piped_ranks import PipedRanks
from enginecore.messages import EngineLimits, RankDown, RankEvent, RankOut, RankUp

LIMIT_S = 60


def test_events_come_in_order_and_the_end_of_the_pipe_is_told_last():
    events: list[RankEvent] = [
        RankUp(1, 2, "ipc:///a", EngineLimits(64, 320, 8, 16, lockstep=True)),
        RankDown(1, 2, "why\nso", [(3, 1 << 39), (0, 0)], alone=True),
        RankOut(1, "gone"),
    ]
    reading, writing = os.pipe()
    told: list[RankEvent | str] = []
    ended = threading.Event()

    def on_end() -> None:
        told.append("end")
        ended.set()

    with os.fdopen(reading, "rb") as source, os.fdopen(writing, "wb") as sink:
        ranks = PipedRanks({1: Path("board-1")}, None, source, on_end)
        ranks.listen(told.append)
        for event in events:
            sink.write(msgspec.json.encode(event) + b"\n")
        sink.flush()
        sink.close()
        assert ended.wait(LIMIT_S)
        ranks.stop()
    assert told == [*events, "end"]
