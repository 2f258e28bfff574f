"""A progress bar on standard error, for people."""

import sys
import time
from types import TracebackType
from typing import Self


class NoProgress:
    """Shows nothing: standard error is no terminal."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def stepped(self, generated: int) -> None:
        """Pass over a step."""

    def ended(self) -> None:
        """Pass over a job's end."""


class ProgressBar:
    """Shows how many jobs have ended and how fast tokens come."""

    def __init__(self, total: int | None) -> None:
        """`total` is the number of jobs; None when it is not known."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]:.0f} tok/s"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("requests", total=total, speed=0.0)
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def stepped(self, generated: int) -> None:
        """Show the mean speed so far."""
        elapsed = time.monotonic() - self._started
        self._progress.update(self._task, speed=generated / elapsed if elapsed > 0 else 0.0)

    def ended(self) -> None:
        """Move the bar by one job."""
        self._progress.advance(self._task)


def show_progress(total: int | None) -> ProgressBar | NoProgress:
    """Return a bar when standard error is a terminal."""
    return ProgressBar(total) if sys.stderr.isatty() else NoProgress()
