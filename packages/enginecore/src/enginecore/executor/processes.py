"""Workers as child processes of this one, on this host: see `enginecore.worker.process`.

What a worker logs appears on our standard error, and what it prints otherwise is logged with its rank.
"""

import collections
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import IO

import msgspec

from collectives.interfaces import local_address
from enginecore import logs
from enginecore.config import EngineConfig
from enginecore.data_parallel.messages import ALONE, RankPlace
from enginecore.errors import ConfigError
from enginecore.executor.distributed import Ending, RankLocation, WorkerHandle
from enginecore.executor.link import CoreEnd
from enginecore.threads import user_environment

logger = logging.getLogger(__name__)

_KEPT_LINES = 40
_COMMAND = (sys.executable, "-P", "-m", "enginecore.worker.process")
"""-P: files in the working folder are not taken for libraries of their names."""
_CHATTER = re.compile(r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks")
"""What gloo prints of every group that it has made."""


def start_processes(config: EngineConfig, place: RankPlace = ALONE) -> list[WorkerHandle]:
    """Start a process for each rank, and wait for none.

    The ranks of `place.local_count` engines share this host.

    Raises:
        ConfigError: this host has fewer devices than ranks.
    """
    ranks = config.world_size
    local_size = place.local_count * ranks
    _check_devices(config.device, local_size)
    host = _own_address(config)
    started: list[WorkerHandle] = []
    try:
        for rank in range(ranks):
            local_rank = place.local_index * ranks + rank
            location = RankLocation(host, local_rank, local_size)
            timeout = config.distributed_timeout_seconds
            started.append(WorkerProcess(rank, location, timeout, number=place.rank * ranks + rank))
    except BaseException:
        for worker in started:
            worker.release()
            worker.end(0)
        raise
    return started


class WorkerProcess:
    """A worker's process; see `WorkerHandle`."""

    def __init__(
        self, rank: int, location: RankLocation, timeout: float, *, number: int | None = None
    ) -> None:
        """Start the process; `location` is on this host, and `timeout` that of `CoreEnd`.

        `number` is its rank among those of all engines, for the log; by default `rank`.
        """
        self.rank = rank
        self.location = location
        self.link = CoreEnd(None, timeout)
        try:
            # A session of its own, so that Ctrl-C in a terminal reaches the parent alone, which then decides.
            self._process = subprocess.Popen(
                [*_COMMAND, msgspec.json.encode(self.link.settings)],
                env=user_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException:
            self.link.close()
            raise
        self.pid = self._process.pid
        over = os.pidfd_open(self.pid)
        weakref.finalize(self, os.close, over)
        self.link.watch(over)
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        # The thread holds no reference to this object, so that dropping it drops the link.
        self._repeating = threading.Thread(
            target=_repeat,
            args=(self._process.stdout, self._lines, rank if number is None else number),
            daemon=True,
        )
        self._repeating.start()

    def ending(self) -> Ending:
        """Wait for its end, and for its last output."""
        self.end(1.0)
        self._repeating.join(1.0)
        code = self._process.returncode
        if code >= 0:
            return Ending(f"ended with exit status {code}", list(self._lines))
        return Ending(f"was killed by signal {-code} ({signal.strsignal(-code)})", list(self._lines))

    def release(self) -> None:
        """Drop the link, whereupon it ends itself."""
        self.link.close()

    def end(self, timeout: float) -> None:
        """Wait for its end, and force it after `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _repeat(output: IO[bytes], lines: collections.deque[str], rank: int) -> None:
    """Pass on what a worker logs, log what it or a library of its prints, and keep the last of that."""
    logged = False
    for line in output:
        text = line.decode(errors="replace").rstrip()
        logged = logs.is_formatted(text) or (logged and text.startswith("    "))
        if logged:
            # In one piece, so that lines of several workers do not mix.
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
        elif not _CHATTER.match(text):
            lines.append(text)
            logger.warning("rank %d wrote: %s", rank, text)


def _own_address(config: EngineConfig) -> str:
    """Return this host's address for workers that meet: of several hosts, the one that leads to them."""
    if config.coordinator is None or not config.shares_experts:
        return "127.0.0.1"
    host, _, port = config.coordinator.rpartition(":")
    return local_address(host.strip("[]"), int(port))


def _check_devices(device: str, ranks: int) -> None:
    # Where there is no driver torch need not be imported here to find that there is no device.
    if device == "cpu" or (device == "auto" and not Path("/proc/driver/nvidia").exists()):
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (count or device == "cuda") and count < ranks:
        raise ConfigError(f"{ranks} ranks need a CUDA device each, and this machine has {count}")
