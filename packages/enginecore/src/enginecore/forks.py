"""Refuse to use an engine in a process that was forked after the engine was made."""

import os

from enginecore.errors import ForkError


class MadeHere:
    """Remembers the process that an object was made in."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def __bool__(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise ForkError in any other process."""
        if not self:
            raise ForkError(
                f"this engine was made in process {self._pid}, of which process {os.getpid()} is a fork: "
                "its threads and devices stay with the process that made it. Make an engine after the fork, "
                "or start processes by spawn (gunicorn without --preload, "
                'multiprocessing.get_context("spawn"))'
            )
