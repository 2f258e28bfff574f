"""An engine core on one host with a worker, whose other worker is on a second host.

As a program, `two_hosts_core.py SETUP` (JSON) runs requests and prints their tokens, then keeps a request
going. What ends it in the end is one more line: the error's kind and text. All lines are JSON.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from cores import Ask, run
from enginecore.core.engine_core import EngineCore
from enginecore.errors import OctavoError
from enginecore.executor.distributed import DistributedExecutor, Ending, RankLocation
from enginecore.executor.link import CoreEnd
from enginecore.executor.processes import WorkerProcess
from enginecore.model_files import locate
from executors import options, ragged_asks


class FarProcess:
    """A worker on the other host: see `WorkerHandle`."""

    def __init__(self, link, prefix):
        self._process = subprocess.Popen(
            [*prefix, sys.executable, Path(__file__).with_name("far_worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # Gloo prints
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._process.stdin.write(msgspec.json.encode(link.settings) + b"\n")
        self._process.stdin.flush()
        self.rank, self.pid, self.link = 1, self._process.pid, link
        self.location = RankLocation("not used", 0, 1, on_core_host=False)
        link.watch(os.pidfd_open(self.pid))

    def ending(self):
        if self._process.poll() is None:
            return Ending("is not heard of any more", [])
        lines = self._process.stderr.read().decode().splitlines()
        return Ending(f"ended with exit status {self._process.returncode}", lines)

    def release(self):
        self.link.close()

    def end(self, timeout):
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start(setup):
    """Return the executor; `setup` has the model, this host's address, the way to the other host, options.

    It also has the address of this host at which rank 0 is to listen for the other rank.
    """
    config = options(Path(setup["model"]), tensor_parallel_size=2, **setup["options"])
    timeout = config.distributed_timeout_seconds
    near = WorkerProcess(0, RankLocation(setup["rendezvous"], 0, 1), timeout)
    far = FarProcess(CoreEnd(setup["address"], timeout), setup["prefix"])
    return DistributedExecutor([near, far], config, locate(config.model)), config


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
        cause = error.__cause__ or error
        say([type(cause).__name__, str(cause)])


def say(value):
    """Print a line of JSON."""
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
