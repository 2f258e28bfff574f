"""`octavo-serve` as a process, and OpenAI's client of it."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai

LIMIT_S = 120
"""Seconds after which waiting for a process or a state is given up, on the slowest machine."""


class Server:
    """`octavo-serve` on a free port; `ready` when the model is loaded."""

    def __init__(
        self, model: Path, *flags: str, environment: Mapping[str, str] | None = None, wait: bool = True
    ) -> None:
        """Start it and, with `wait`, wait until it is ready."""
        program = str(Path(sys.executable).parent / "octavo-serve")
        command = [program, str(model), "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.lines: list[str] = []
        """What it has logged."""
        self.url = self._wait_for(r"listening on (http://\S+),")[1]
        if wait:
            self._wait_for("ready on")
        # Read on, since a full pipe would stop it.
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        self.client: Any = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def _wait_for(self, pattern: str) -> re.Match[str]:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            found = re.search(pattern, line)
            if found:
                return found
        raise AssertionError(f"the server ended without {pattern!r}: {self.lines}")

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += (line.rstrip("\n") for line in self.process.stderr)

    def gauge(self, name: str, **labels: str) -> float:
        text = httpx.get(f"{self.url}/metrics").text
        wanted = ".*".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
        found = re.search(rf"^octavo_{name}{{.*{wanted}.*}} (\S+)$", text, re.MULTILINE)
        assert found is not None
        return float(found[1])

    def wait_until_idle(self) -> None:
        """Wait until nothing runs, waits or holds KV cache."""
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        wait_until(lambda: all(self.gauge(name) == 0 for name in gauges))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
