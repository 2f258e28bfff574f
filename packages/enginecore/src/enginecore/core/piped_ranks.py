"""Ranks that another process keeps alive, which tells of them through a pipe."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from enginecore.data_parallel.messages import CoordinatorAddress
from enginecore.messages import RankEvent

_event = msgspec.json.Decoder(RankEvent)


class PipedRanks:
    """Ranks that another process keeps alive, as an `AsyncEngine` needs them, from lines of JSON.

    Args:
        boards: Path of each rank's board.
        coordinator: Where to learn their loads; None with one rank.
        events: A line for each event. Once it closes `on_end` is called: who kept the ranks alive has gone.
    """

    def __init__(
        self,
        boards: dict[int, Path],
        coordinator: CoordinatorAddress | None,
        events: BinaryIO,
        on_end: Callable[[], None],
    ) -> None:
        self.boards = boards
        self.coordinator = coordinator
        self._events = events
        self._on_end = on_end

    def listen(self, listener: Callable[[RankEvent], None]) -> None:
        """Call `listener`, from another thread, with each event. To be called once."""

        def read() -> None:
            for line in self._events:
                listener(_event.decode(line))
            self._on_end()

        threading.Thread(target=read, daemon=True, name="rank-events").start()

    def stop(self) -> None:
        """Need the ranks no more; they are not ended."""
