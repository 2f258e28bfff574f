"""How much clients may ask for at a time: a bounded queue, and requests for each key.

HTTP processes share the counts in a file: each writes a row of its own, and all add the rows up.
"""

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from octavo_serve.config import ServeConfig
from octavo_serve.errors import ApiError

_WAITING, _UNFINISHED, _FIRST_KEY = 0, 1, 2
_LONGEST_WAIT = 60
"""Most seconds that a client is asked to stay away."""


def make_counts(path: Path, processes: int, keys: int) -> None:
    """Make the file for so many HTTP processes and keys, all zero."""
    path.write_bytes(bytes(4 * processes * (_FIRST_KEY + keys)))


class Limits:
    """Admits requests up to the options' limits; one process's view of what all have going on."""

    def __init__(
        self, options: ServeConfig, keys: Sequence[str], path: Path | None = None, index: int = 0
    ) -> None:
        """`keys` are the names of clients' keys; `path` is the file of all processes, None for one alone."""
        self._max_queue = options.max_queue
        self._most = options.max_requests_per_key
        self._columns = {name: _FIRST_KEY + number for number, name in enumerate(keys)}
        width = _FIRST_KEY + len(keys)
        if path is None:
            self._counts = np.zeros((1, width), np.int32)
        else:
            self._counts = np.memmap(path, np.int32, "r+").reshape(-1, width)
        self._mine = self._counts[index]
        self._mine[:] = 0

    def note_load(self, waiting: int, unfinished: int) -> None:
        """Take note of how many requests of this process wait for their first step, and have not finished."""
        self._mine[_WAITING], self._mine[_UNFINISHED] = waiting, unfinished

    def check_queue(self, new: int, seats: int, queue_seconds: float) -> None:
        """Refuse `new` requests if more than the limit would wait.

        `seats` is how many requests can run at once, 0 while the engine itself has some in its queue, and
        `queue_seconds` how long requests wait at present.

        Raises:
            ApiError: 429, with `Retry-After` in whole seconds.
        """
        if self._max_queue is None:
            return
        waiting, unfinished = self._counts[:, :_FIRST_KEY].sum(axis=0).tolist()
        free = max(0, seats - (unfinished - waiting))
        if waiting + new > self._max_queue + free:
            queued = max(0, waiting - free)
            seconds = min(max(1, math.ceil(queue_seconds)), _LONGEST_WAIT)
            raise ApiError(
                429,
                f"the queue is full: {queued} requests wait, and max_queue is {self._max_queue}",
                code="queue_full",
                headers={"Retry-After": str(seconds)},
            )

    @contextmanager
    def one_more(self, key: str | None) -> Generator[None]:
        """Count a request of the client whose key has this name, for as long as the context is open.

        Raises:
            ApiError: 429, the client has as many already as a key may.
        """
        if key is None or self._most is None:
            yield
            return
        column = self._columns[key]
        # Counted first: of two processes that look at the same time none may admit one too many.
        self._mine[column] += 1
        try:
            if self._counts[:, column].sum() > self._most:
                raise ApiError(
                    429,
                    f"max_requests_per_key is {self._most}, and as many with this key run or wait",
                    code="rate_limit_exceeded",
                    headers={"Retry-After": "1"},
                )
            yield
        finally:
            self._mine[column] -= 1
