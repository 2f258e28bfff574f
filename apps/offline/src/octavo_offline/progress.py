"""Progress on standard error: bars on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, Self

PLAIN_INTERVAL = 5.0
"""Seconds between two plain lines."""


class Watcher(Protocol):
    """Is told how a run goes on."""

    def stepped(self, generated: int) -> None:
        """Take notice of a step; `generated` is the number of tokens since the engine's start."""

    def ended(self) -> None:
        """Take notice of a job's end."""


class NoProgress:
    """Shows nothing: the answers themselves are seen as they come."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def stepped(self, generated: int) -> None:
        """Pass over a step."""

    def ended(self) -> None:
        """Pass over a job's end."""


class PlainProgress:
    """Writes a line every few seconds, for logs."""

    def __init__(self, total: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`total` is the number of jobs, None when it is not known; `clock` gives seconds."""
        self._of = "" if total is None else f" of {total}"
        self._clock = clock
        self._started = self._last = clock()
        self._ended = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def stepped(self, generated: int) -> None:
        """Write a line if the last one is long enough ago."""
        now = self._clock()
        if now - self._last >= PLAIN_INTERVAL:
            self._last = now
            speed = generated / (now - self._started)
            _write(f"{self._ended}{self._of} requests, {generated} tokens, {speed:.0f} tok/s")

    def ended(self) -> None:
        """Count a job."""
        self._ended += 1


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


def show_progress(total: int | None) -> ProgressBar | PlainProgress:
    """Return a bar when standard error is a terminal, and otherwise plain lines."""
    return ProgressBar(total) if sys.stderr.isatty() else PlainProgress(total)


@contextmanager
def show_loading(
    model: str, clock: Callable[[], float] = time.monotonic
) -> Generator[Callable[[int, int], None]]:
    """Yield what to tell how many of the tensors of `model` are loaded, and of how many.

    A terminal shows a bar that goes away at the end; elsewhere there are plain lines.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tensors"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(f"loading {model}", total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)
        return
    started = last = clock()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if clock() - last >= PLAIN_INTERVAL:
            last = clock()
            _write(f"{done} of {total} tensors loaded")

    _write(f"loading {model}")
    yield tell
    _write(f"loaded in {clock() - started:.1f} s")


def _write(text: str) -> None:
    print(f"octavo-offline: {text}", file=sys.stderr, flush=True)
