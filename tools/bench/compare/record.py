"""Make one record, in an environment of the engine's: `python -m compare.record TASK`.

The process that watches reads events from stdout, a JSON object a line: `ready` when the engine is loaded and
warm, `done` with the figures. After each it must say, with a line on stdin, to go on; so it can take the
machine's and the processes' use of the CPU at the moments between which the engine is measured.
"""

import json
import os
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import Any, Protocol, TextIO

from compare import client
from compare.peers import PEERS
from compare.server import free_port, running
from compare.tasks import Task
from compare.workloads import WARM_UP, WORKLOADS, Request, throughput

FIRST_TOKEN = 5000
"""Added to the round of the request that measures TTFT, so that no prefix of the next one is cached."""


class Subject(Protocol):
    """A loaded engine, to be warmed up and measured on the task's workload."""

    process: int
    """The process whose memory, with that of its descendants, is the engine's."""

    def warm_up(self) -> None: ...

    def measure(self) -> dict[str, Any]: ...

    def tokens(self) -> list[int]:
        """A greedy answer, to see that engines compute the same. Empty where the engine does not tell ids."""
        ...


class OfflineSubject:
    """An engine that takes all requests of a workload in a call."""

    def __init__(self, task: Task, engine: Any) -> None:
        self._task, self._engine = task, engine
        self.process = os.getpid()

    def warm_up(self) -> None:
        self._generate([r._replace(max_tokens=8) for r in WORKLOADS["W1"].requests(WARM_UP, self._task.size)])
        self._generate(WORKLOADS["W3"].requests(WARM_UP, self._task.size))

    def measure(self) -> dict[str, Any]:
        workload, size = WORKLOADS[self._task.workload], self._task.size
        requests = workload.requests(self._task.round, size)
        if workload.name != "W3":
            return throughput(requests, self._generate(requests))
        other = workload.requests(self._task.round + FIRST_TOKEN, size)
        first = self._generate([request._replace(max_tokens=1) for request in other])
        seconds = self._generate(requests)
        between = (seconds - first) / (requests[0].max_tokens - 1)
        return throughput(requests, seconds) | {"ttft_p50_ms": 1000 * first, "tpot_p50_ms": 1000 * between}

    def tokens(self) -> list[int]:
        return self._engine.generate(WORKLOADS["W3"].requests(0, self._task.size))[0]

    def _generate(self, requests: Sequence[Request]) -> float:
        start = time.perf_counter()
        outputs = self._engine.generate(requests)
        seconds = time.perf_counter() - start
        lengths = [len(output) for output in outputs]
        if lengths != (wanted := [request.max_tokens for request in requests]):
            raise RuntimeError(f"the engine generated {lengths} tokens, not {wanted}")
        return seconds


class ServerSubject:
    """A running HTTP server."""

    def __init__(self, task: Task, module: Any, port: int, process: int) -> None:
        self._task, self._module, self._port = task, module, port
        self._extra = getattr(module, "EXTRA", {})
        self.process = process

    def warm_up(self) -> None:
        size = self._task.size
        self._complete(WORKLOADS["W3"].requests(WARM_UP, size), stream=True)
        short = [r._replace(max_tokens=8) for r in WORKLOADS["W4-burst"].requests(WARM_UP, size)]
        self._complete(short, stream=True)

    def measure(self) -> dict[str, Any]:
        workload = WORKLOADS[self._task.workload]
        requests = workload.requests(self._task.round, self._task.size)
        stream = workload.online or workload.name == "W3"
        answers, seconds = self._complete(requests, stream=stream, rate=workload.rate)
        return throughput(requests, seconds) | (client.latencies(answers) if stream else {})

    def tokens(self) -> list[int]:
        if not hasattr(self._module, "tokens"):
            return []
        return self._module.tokens(self._port, WORKLOADS["W3"].requests(0, self._task.size)[0])

    def _complete(
        self, requests: Sequence[Request], *, stream: bool, rate: float | None = None
    ) -> tuple[list[client.Answer], float]:
        return client.complete(self._port, requests, stream=stream, rate=rate, extra=self._extra)


@contextmanager
def loaded(task: Task) -> Generator[Subject]:
    """Load the engine of `task`, or start its server."""
    peer = PEERS[task.peer]
    module = import_module(f"compare.engines.{peer.engine}")
    if peer.uses_server(WORKLOADS[task.workload]):
        port = free_port()
        with running(module.serve(task, port), port) as process:
            yield ServerSubject(task, module, port, process)
    else:
        yield OfflineSubject(task, module.Offline(task))


def make_record(task: Task, events: TextIO, answers: TextIO) -> None:
    """Load, warm up, measure, each when told."""

    def tell(**event: Any) -> None:
        print(json.dumps(event), file=events, flush=True)
        if not answers.readline():
            sys.exit("nobody watches")

    start = time.perf_counter()
    with loaded(task) as subject:
        startup = time.perf_counter() - start
        subject.warm_up()
        tell(event="ready", process=subject.process)
        figures = subject.measure()
        tell(event="done", startup_s=startup, version=version(PEERS[task.peer].distribution), **figures)
        tell(event="tokens", tokens=subject.tokens() if task.workload == "W3" else [])


def main() -> None:
    """Keep stdout for events: whatever engines print goes to stderr."""
    with os.fdopen(os.dup(1), "w") as events:
        os.dup2(2, 1)
        make_record(Task(**json.loads(sys.argv[1])), events, sys.stdin)


if __name__ == "__main__":
    main()
