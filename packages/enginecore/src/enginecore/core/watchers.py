"""The front-ends that watch a core's steps, and when they are told of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from enginecore.core.step_log import DELIVER, IDLE, StepLog

if TYPE_CHECKING:
    from enginecore.core.engine_core import EngineCore
    from enginecore.messages import StepsView

_SECONDS_BETWEEN_VIEWS = 0.25
_SECONDS_BETWEEN_MAPS = 1.0


class Watchers:
    """Has a core record its steps while there is a watcher, and says when a view of them is due."""

    def __init__(self, core: EngineCore, clock: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._clock = clock
        self.clients: set[int] = set()
        self._view_due = 0.0
        self._map_due = 0.0

    def add(self, client: int) -> None:
        """Let a client watch; the next view is due at once, with a map of the blocks."""
        self.clients.add(client)
        if self._core.step_log is None:
            self._core.step_log = StepLog()
        self._view_due = self._map_due = 0.0

    def discard(self, client: int) -> None:
        """Let a client watch no longer; without any, nothing is recorded."""
        self.clients.discard(client)
        if not self.clients:
            self._core.step_log = None

    def waited(self) -> None:
        """Count the time since the last phase as idle."""
        if self._core.step_log is not None:
            self._core.step_log.spent(IDLE)

    def stepped(self) -> None:
        """Record a step whose outputs have been sent."""
        if self._core.step_log is not None:
            self._core.step_log.spent(DELIVER)
            self._core.step_log.record()

    def view(self) -> StepsView | None:
        """Return what the watchers are to be sent now; None where nobody watches or none is due."""
        if not self.clients:
            return None
        now = self._clock()
        if now < self._view_due:
            return None
        with_blocks = now >= self._map_due
        self._view_due = now + _SECONDS_BETWEEN_VIEWS
        if with_blocks:
            self._map_due = now + _SECONDS_BETWEEN_MAPS
        return self._core.steps_view(with_blocks=with_blocks)
