"""Engines that share the requests of one model, each a core process, and their coordinator's process."""

import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq

from cores import Answer, Ask, message
from enginecore.codec import Decoder, Encoder
from enginecore.config import EngineConfig
from enginecore.core.board import Board
from enginecore.core.identity import frontend_identity
from enginecore.core.settings import CoreSettings
from enginecore.data_parallel.coordinator_process import CoordinatorPorts, CoordinatorSettings
from enginecore.data_parallel.link import ask_status
from enginecore.data_parallel.messages import CoordinatorAddress, RankPlace, Status
from enginecore.messages import AbortRequests, CoreMessage, Failed, Loading, Outputs, Ready


class _Process:
    """A module that takes settings from standard input, and reports on standard output that it is ready."""

    def __init__(self, module: str, settings: Any, report: Any) -> None:
        self._report = msgspec.json.Decoder(report)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(settings) + b"\n")
        self.process.stdin.flush()

    def ready(self) -> Any:
        """Return the first report that is not of the progress before it."""
        assert self.process.stdout is not None
        while True:
            report = self._report.decode(self.process.stdout.readline())
            if not isinstance(report, Loading):
                return report

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class RankGroup:
    """All ranks of `config.data_parallel_size` on this host; requests go to the rank that a caller names."""

    def __init__(self, config: EngineConfig, folder: Path, *, group: int = 0) -> None:
        self._context = zmq.Context()
        self._encoder, self._decoder = Encoder(), Decoder(CoreMessage)
        self._answers: dict[tuple[int, int], Answer] = {}
        self.errors: dict[tuple[int, int], str] = {}
        self._others: dict[int, list[Any]] = defaultdict(list)
        self.address = CoordinatorAddress(f"ipc://{folder}/reports", f"ipc://{folder}/snapshots")
        self._settings = CoordinatorSettings(self.address)
        self._coordinator = self._start_coordinator()
        count = config.data_parallel_size
        self._cores = []
        self._sockets = []
        for rank in range(count):
            address = f"ipc://{folder}/core{rank}"
            board = folder / f"board{rank}"
            Board.prepare(board, 4 * config.max_num_seqs)
            place = RankPlace(rank, rank, count, group=group)
            settings = CoreSettings(config, address, str(board), place, self.address)
            self._cores.append(_Process("enginecore.core.process", settings, Loading | Ready | Failed))
            socket = self._context.socket(zmq.DEALER)
            socket.linger = 0
            socket.setsockopt(zmq.IDENTITY, frontend_identity(0))
            socket.connect(address)
            self._sockets.append(socket)

    def ready(self) -> list[Ready | Failed]:
        """Wait until all ranks have loaded or refused."""
        try:
            return [core.ready() for core in self._cores]
        except BaseException:
            self.close()
            raise

    def processes(self) -> list[psutil.Process]:
        """Return cores and workers."""
        cores = [psutil.Process(core.process.pid) for core in self._cores]
        return cores + [child for core in cores for child in core.children(recursive=True)]

    def kill_coordinator(self) -> None:
        """Kill the coordinator, and start it anew at the same address."""
        self._coordinator.process.kill()
        self._coordinator.end()
        self._coordinator = self._start_coordinator()

    def suspend(self, rank: int) -> None:
        """Stop a core's process until `resume`."""
        psutil.Process(self._cores[rank].process.pid).suspend()

    def resume(self, rank: int) -> None:
        """Let a core's process go on."""
        psutil.Process(self._cores[rank].process.pid).resume()

    def status(self) -> Status:
        """Return the coordinator's."""
        status = ask_status(self.address)
        assert status is not None
        return status

    def add(self, rank: int, number: int, ask: Ask) -> None:
        """Send a request."""
        self._answers[rank, number] = Answer()
        self.send(rank, message(number, ask))

    def abort(self, rank: int, number: int) -> None:
        """Abort a request, of which no answer is waited for."""
        del self._answers[rank, number]
        self.send(rank, AbortRequests([number]))

    def send(self, rank: int, content: Any) -> None:
        """Send a message to a core."""
        self._sockets[rank].send(self._encoder.encode(content))

    def collect(self, seconds: float = 120) -> dict[tuple[int, int], Answer]:
        """Return all answers since the last call, by rank and number, once they are finished."""
        until = time.monotonic() + seconds
        while not all(answer.finish for answer in self._answers.values()):
            assert time.monotonic() < until, f"{self._unfinished()} did not finish"
            self.take(1.0)
        answers, self._answers = self._answers, {}
        return answers

    def other(self, rank: int, seconds: float = 60) -> Any:
        """Return the next message of a core that has no outputs."""
        until = time.monotonic() + seconds
        while not self._others[rank]:
            assert time.monotonic() < until, "there was no message"
            self.take(1.0)
        return self._others[rank].pop(0)

    def tokens_of(self, rank: int, number: int) -> int:
        """Return how many tokens a request has got so far."""
        return len(self._answers[rank, number].tokens)

    def take(self, seconds: float) -> None:
        """Wait up to so long for outputs, and take them."""
        poller = zmq.Poller()
        for socket in self._sockets:
            poller.register(socket, zmq.POLLIN)
        poller.poll(round(1000 * seconds))
        for rank, socket in enumerate(self._sockets):
            while socket.poll(0):
                self._handle(rank, self._decoder.decode(socket.recv()))

    def close(self) -> list[psutil.Process]:
        """End everything; return the processes that are left, which should be none."""
        processes = [process for process in self.processes() if process.is_running()]
        for process in (*self._cores, self._coordinator):
            process.end()
        self._context.destroy(linger=0)
        return psutil.wait_procs(processes, 15)[1]

    def _start_coordinator(self) -> _Process:
        started = _Process("enginecore.data_parallel.coordinator_process", self._settings, CoordinatorPorts)
        assert isinstance(started.ready(), CoordinatorPorts)
        return started

    def _handle(self, rank: int, content: Any) -> None:
        if not isinstance(content, Outputs):
            assert not isinstance(content, Failed), content.message
            self._others[rank].append(content)
            return
        assert not content.errors, content.errors
        columns = content.numbers.tolist(), content.tokens.tolist(), content.finished.tolist()
        for number, token, finished in zip(*columns, strict=True):
            answer = self._answers.get((rank, number))
            if answer is not None:
                assert answer.finish == 0, "a token after the end"
                answer.tokens.append(token)
                answer.finish = finished

    def _unfinished(self) -> list[tuple[int, int]]:
        return [key for key, answer in self._answers.items() if not answer.finish]
