"""`octavo-serve` with all its processes, which can be found, killed and counted. Needs no torch."""

import os
import signal
import uuid
from collections import Counter
from pathlib import Path
from typing import Self

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from server_process import LIMIT_S, Server, wait_until

_MARK = "OCTAVO_TEST_SERVER"
"""Environment variable that all processes of a server share, whoever their parent is."""

FLAGS = ("--device", "cpu", "--dtype", "float32", "--num-blocks-override", "1024")
"""With them answers are the same, whoever else runs at the same time."""

ROLES = {
    "rank": "enginecore.core.process",
    "worker": "enginecore.worker.process",
    "coordinator": "enginecore.data_parallel.coordinator_process",
    "http": "octavo_serve.process",
}
"""Module that a process of each role runs."""

Counts = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""Values of metrics, by name and labels."""


class ParallelServer(Server):
    """A server; as a context, it is killed at the end with all that it started."""

    def __init__(self, model: Path, *flags: str, wait: bool = True, **environment: str) -> None:
        self._mark = uuid.uuid4().hex
        try:
            marked = os.environ | {_MARK: self._mark} | environment
            super().__init__(model, *flags, environment=marked, wait=wait)
        except BaseException:
            self.kill_all()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.kill_all()
        self.stop()

    def processes(self, role: str | None = None) -> list[psutil.Process]:
        """Return its running processes, those of one role in the order of their starts."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get(_MARK) == self._mark
                if ours and (role is None or ROLES[role] in process.cmdline()):
                    found.append(process)
            except psutil.Error:  # it has ended, or is none of ours
                continue
        return sorted(found, key=lambda process: (process.create_time(), process.pid))

    def kill_all(self) -> None:
        """Kill whatever is left."""
        for process in self.processes():
            process.kill()

    def terminate(self) -> int:
        """Ask it to stop, wait, and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.ending()

    def ending(self) -> int:
        """Wait until no process of it is left, and return its exit status."""
        status = self.process.wait(LIMIT_S)
        wait_until(lambda: not self.processes())
        return status

    def logged(self, text: str) -> int:
        """Return how many lines of the log hold `text`."""
        return sum(text in line for line in list(self.lines))

    def counts(self) -> Counts:
        """Return all that it counts, gauges too."""
        text = httpx.get(f"{self.url}/metrics", timeout=LIMIT_S).text
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def counters(self) -> Counts:
        """Return what may never fall."""
        return {
            (name, labels): value
            for (name, labels), value in self.counts().items()
            if name.startswith("octavo_") and name.endswith(("_total", "_count", "_bucket", "_sum"))
        }

    def health(self) -> httpx.Response:
        """Return the answer of /health."""
        return httpx.get(f"{self.url}/health", timeout=LIMIT_S)

    def wait_until_up(self, ranks: int) -> None:
        """Wait until so many ranks run."""
        wait_until(lambda: total(self.counts(), "octavo_engine_up") == ranks)


def total(counts: Counts, name: str, **labels: str) -> float:
    """Return the sum of a metric over all labels but those given."""
    return sum(
        value
        for (other, found), value in counts.items()
        if other == name and labels.items() <= dict(found).items()
    )


def by_rank(counts: Counts, name: str) -> Counter[str]:
    """Return a metric's values by rank."""
    found: Counter[str] = Counter()
    for (other, labels), value in counts.items():
        if other == name:
            found[dict(labels)["engine"]] += int(value)
    return found


GAUGES = (
    "octavo_num_requests_running",
    "octavo_num_requests_waiting",
    "octavo_kv_cache_usage_perc",
    "http_requests_in_progress",
)


def wait_until_idle(server: ParallelServer) -> None:
    """Wait until nothing runs, waits or holds a block of the KV cache, on any rank."""

    def idle() -> bool:
        counts = server.counts()
        return all(total(counts, name) == 0 for name in GAUGES)

    wait_until(idle)
