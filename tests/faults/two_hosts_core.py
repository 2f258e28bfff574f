"""An engine core on one host with a worker, whose other worker is on a second host.

As a program, `two_hosts_core.py SETUP` (JSON) runs requests and prints their tokens, then keeps a request
going. What ends it in the end is one more line: the error's kind, text and time. All lines are JSON.
"""

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from cores import Ask, run
from enginecore.core.engine_core import EngineCore
from enginecore.errors import OctavoError
from enginecore.executor.distributed import DistributedExecutor, Ending
from enginecore.executor.link import CoreEnd
from enginecore.executor.placement import Placement, Seat, free_address
from enginecore.executor.processes import WorkerProcess
from enginecore.model_files import locate
from executors import options, ragged_asks


class FarProcess:
    """A worker on the other host: see `WorkerHandle`."""

    def __init__(self, settings, link, prefix):
        command = [*prefix, sys.executable, Path(__file__).with_name("far_worker.py")]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # Gloo prints
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._process.stdin.write(msgspec.json.encode(settings) + b"\n")
        self._process.stdin.flush()
        self.rank, self.pid, self.ended = settings.rank, self._process.pid, False
        self._link = link
        self._over = os.pidfd_open(self.pid)
        self._readable = select.epoll()
        self._readable.register(link, select.EPOLLIN)
        self._readable.register(self._over, select.EPOLLIN)

    def fileno(self):
        return self._readable.fileno()

    def receive(self):
        said = self._link.receive()
        self.ended = self._link.ended or self._process.poll() is not None
        return said

    def ending(self):
        if self._process.poll() is None:
            return Ending("is not heard of any more", [])
        lines = self._process.stderr.read().decode().splitlines()
        return Ending(f"ended with exit status {self._process.returncode}", lines)

    def release(self):
        self._link.close()

    def end(self, timeout):
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start(setup):
    """Return the executor; `setup` has the model, this host's address, the way to the other host, options."""
    config = options(Path(setup["model"]), tensor_parallel_size=2, **setup["options"])
    link = CoreEnd(setup["address"], config.distributed_timeout_seconds)

    def launch(settings):
        far = msgspec.structs.replace(settings[1], **setup["far_settings"])
        return [WorkerProcess(settings[0]), FarProcess(far, link, setup["prefix"])]

    seats = [Seat(0, 1), Seat(0, 1, near=False, link=link)]
    placement = Placement(seats, free_address(setup["address"]))
    return DistributedExecutor(config, locate(config.model), launch, placement), config


def main(setup):
    """Run the requests in three ways: at once, again with their prefixes cached, and in chunks."""
    try:
        executor, config = start(setup)
        core = EngineCore(config, executor)
        for _ in range(2):
            say([answer.tokens for answer in run(core, ragged_asks())])
        core = EngineCore(replace(config, max_num_batched_tokens=16), executor)
        say([answer.tokens for answer in run(core, ragged_asks())])
        while True:
            run(core, [Ask(list(range(200)), 200)])
    except OctavoError as error:
        say([type(error).__name__, str(error), time.monotonic()])


def say(value):
    """Print a line of JSON."""
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
