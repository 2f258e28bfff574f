"""What every fault under load must leave as it was: answers, counts, the KV cache, the processes."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence

from mixed_load import Answer, Body, Load, differences, tokens_of
from parallel_server import Counts, ParallelServer, total, wait_until_idle

CHUNKS_BEFORE = 300
"""Pieces of streams that have come before something is killed: most requests run by then, few have ended."""


class Counters:
    """Reads a server's counters all the time, which must never fall."""

    def __init__(self, server: ParallelServer) -> None:
        self._server = server
        self._ended = threading.Event()
        self.fallen: list[str] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Counters":
        self._last = self._server.counters()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        self._compare()

    def _watch(self) -> None:
        while not self._ended.wait(0.2):
            self._compare()

    def _compare(self) -> None:
        now = self._server.counters()
        self.fallen += [
            f"{key} from {value} to {now.get(key)}"
            for key, value in self._last.items()
            if now.get(key, 0) < value
        ]
        self._last |= now


def run_with(
    server: ParallelServer, bodies: Sequence[Body], fault: Callable[[Load], None]
) -> tuple[list[Answer], Load]:
    """Send all requests at once, and call `fault` in their midst, once."""
    load = Load(server.url)
    faulted = threading.Thread(target=fault, args=(load,))

    def on_chunk(count: int) -> None:
        if count == CHUNKS_BEFORE:
            faulted.start()

    load.on_chunk = on_chunk
    answers = asyncio.run(load.run(bodies))
    faulted.join()
    return answers, load


def assert_nothing_lost(
    server: ParallelServer,
    bodies: Sequence[Body],
    right: Sequence[Answer],
    fault: Callable[[Load], None],
    *,
    others: int = 0,
    failures: int = 0,
) -> float:
    """Send requests with a fault in their midst, whose answers must be right and count once.

    `others` is the number of requests that `fault` sends and that are answered; `failures` those that fail.
    Return the seconds from the fault until all ranks run again.
    """
    ranks = int(total(server.counts(), "octavo_engine_up"))
    before = server.counts()
    at = []

    def timed(load: Load) -> None:
        at.append(time.monotonic())
        fault(load)

    with Counters(server) as counters:
        answers, _ = run_with(server, bodies, timed)
        server.wait_until_up(ranks)
        seconds = time.monotonic() - at[0]
        wait_until_idle(server)
    assert differences(answers, right) == {}
    assert counters.fallen == []
    assert_counted(server, before, answers, others, failures)
    assert server.process.poll() is None
    return seconds


def assert_counted(
    server: ParallelServer, before: Counts, answers: Sequence[Answer], others: int, failures: int
) -> None:
    """Each answer, and each of its tokens, is counted once."""
    after = server.counts()

    def grown(name: str, **labels: str) -> float:
        name = f"octavo_{name}_total"
        return total(after, name, **labels) - total(before, name, **labels)

    failed = grown("request_success", finished_reason="error")
    assert (grown("request_success"), failed) == (len(answers) + others + failures, failures)
    if not others:
        assert (grown("prompt_tokens"), grown("generation_tokens")) == tokens_of(answers)
