"""Fifty random kills in a row under load: nothing fails but what HTTP processes had when they were killed."""

import asyncio
import random
import threading

import psutil
import pytest

from mixed_load import Load, differences
from parallel_server import FLAGS, ParallelServer, wait_until_idle
from server_process import wait_until

KILLS = 50
PIECES_BETWEEN = 400
"""Pieces of streams that come between two kills."""
TWO_RANKS = ("--data-parallel-size", "2", "--api-server-count", "2", "--distributed-executor-backend", "mp")


class Killer:
    """Kills a random process each time that so much of the load has gone on."""

    def __init__(self, server: ParallelServer) -> None:
        self._server = server
        self._draw = random.Random(0)
        self.killed: list[str] = []
        self._wanted = threading.Semaphore(0)
        self._ended = False
        self.cut: set[tuple[int, int]] = set()
        """Local ports of connections that were cut, with the round."""
        self.loads: dict[int, Load] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def on_chunk(self, count: int) -> None:
        if count % PIECES_BETWEEN == 0:
            self._wanted.release()

    def stop(self) -> None:
        self._ended = True
        self._wanted.release()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wanted.acquire()
            if self._ended or len(self.killed) == KILLS:
                return
            role = self._draw.choice(["rank", "worker", "coordinator", "http"])
            found = self._server.processes(role)
            if found:
                self._kill(role, self._draw.choice(found))

    def _kill(self, role: str, process: psutil.Process) -> None:
        try:
            process.suspend()
            if role == "http":
                ports = {end.raddr.port for end in process.net_connections() if end.raddr}
                self.cut |= {(number, port) for number in self.loads for port in ports}
            process.kill()
        except psutil.NoSuchProcess:  # it went with its rank
            return
        self.killed.append(role)


@pytest.mark.timeout(600)
def test_random_kills(small_model, requests, right):
    flags = (*TWO_RANKS, "--max-rank-restarts", "100", "--shutdown-timeout", "1")
    with ParallelServer(small_model, *FLAGS, *flags) as server:
        killer = Killer(server)
        killer.start()
        rounds = 0
        wrong: dict[tuple[int, int], str] = {}
        while len(killer.killed) < KILLS:
            load = killer.loads[rounds] = Load(server.url)
            load.on_chunk = killer.on_chunk
            answers = asyncio.run(load.run(requests))
            for index, text in differences(answers, right).items():
                if (rounds, load.ports.get(index)) not in killer.cut or "cut" not in answers[index]:
                    wrong[rounds, index] = text
            rounds += 1
        killer.stop()
        assert wrong == {}
        server.wait_until_up(2)
        wait_until(lambda: len(server.processes("http")) == 2)
        wait_until_idle(server)
        assert differences(asyncio.run(Load(server.url).run(requests)), right) == {}
        assert server.terminate() == 0
