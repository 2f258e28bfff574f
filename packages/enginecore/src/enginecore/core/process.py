"""The engine core in a process of its own, behind a ZMQ socket.

Started as `python -m enginecore.core.process` with its settings on standard input; who started it keeps that
pipe open, and when it closes, because that ended in whatever way, so does this process. On standard output it
reports lines of JSON: `Loading` while it starts, then `Ready` or `Failed`, and `Failed` if later it ends.
"""

from __future__ import annotations

import logging
import math
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from enginecore import logs
from enginecore.codec import Decoder, Encoder
from enginecore.core.board import Board
from enginecore.core.identity import frontend_identity, frontend_number
from enginecore.core.settings import CoreSettings
from enginecore.core.watchers import Watchers
from enginecore.data_parallel.messages import RegisterRank
from enginecore.errors import EngineDeadError, OctavoError
from enginecore.garbage import freeze_start
from enginecore.messages import (
    AbortRequests,
    AddRequest,
    CoreMessage,
    ExpertLoads,
    Failed,
    FollowPrefixes,
    FrontendMessage,
    Loading,
    Outputs,
    Ready,
    ReportExpertLoads,
    ResetPrefixCache,
    WatchSteps,
)
from enginecore.model_files import locate
from enginecore.parent import end_with_parent, private_stdout

if TYPE_CHECKING:
    from enginecore.core.engine_core import EngineCore
    from enginecore.data_parallel.link import RankLink

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_BEATS = 0.5
"""Longest time in which an idle core's loop does not go round."""
_SECONDS_TO_SEND = 1
"""What front-ends have not taken by then of the last messages is dropped."""


class CoreServer:
    """Reads front-end messages, steps the core, sends each front-end its outputs."""

    def __init__(
        self, core: EngineCore, socket: zmq.Socket, board: Board, rank: int = 0, link: RankLink | None = None
    ) -> None:
        """`socket` is a ROUTER that refuses to send to who is not connected (ZMQ_ROUTER_MANDATORY).

        `link` leads to the coordinator of the ranks.
        """
        self._rank = rank
        self._core = core
        self._link = link
        self._socket = socket
        self._board = board
        self._decoder: Decoder[FrontendMessage] = Decoder(FrontendMessage)
        self._encoder = Encoder()
        self._clients: set[int] = set()
        self._followers: set[int] = set()
        """Clients that follow the prefix cache."""
        self._watchers = Watchers(core)
        self._read_at = time.monotonic()
        """When what front-ends have sent was last taken in."""
        self._ends = socket.get_monitor_socket(zmq.Event.DISCONNECTED)
        """Has a message for each connection that has ended."""

    def run(self) -> NoReturn:
        """Serve until the core fails.

        Raises:
            EngineDeadError: a step failed, or a worker has ended.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._ends, zmq.POLLIN)
        for descriptor in self._core.descriptors:
            poller.register(descriptor, zmq.POLLIN)
        if self._link is not None:
            poller.register(self._link.socket, zmq.POLLIN)
        while True:
            self._board.beat()
            self._follow_coordinator()
            if not self._core.has_work:
                self._board.publish(self._core.stats())
                due = _SECONDS_BETWEEN_BEATS if self._link is None else self._link.due()
                poller.poll(math.ceil(1000 * min(due, _SECONDS_BETWEEN_BEATS)))
                self._core.check_workers()
                self._watchers.waited()
                self._tell_watchers()
            self._read()
            self._forget_gone()
            if self._core.has_work:
                self._step()

    def close(self) -> None:
        """Close the socket, once what has been sent is taken."""
        self._socket.disable_monitor()
        self._socket.close(linger=1000 * _SECONDS_TO_SEND)

    def _follow_coordinator(self) -> None:
        """Send and take what is on the way between the coordinator and this engine."""
        if self._link is None:
            return
        lockstep = self._core.lockstep
        if lockstep is not None:
            for message in lockstep.messages(self._core.has_unfinished):
                self._link.send(message)
        self._link.report(self._core.load_report(self._rank, self._read_at))
        for message in self._link.receive():
            if lockstep is not None:
                lockstep.receive(message)

    def _step(self) -> None:
        outputs = self._core.step()
        self._board.publish(self._core.stats())
        for client, mine in outputs.items():
            self._send(client, mine)
        self._tell_followers()
        self._watchers.stepped()
        self._tell_watchers()

    def _tell_watchers(self) -> None:
        view = self._watchers.view()
        if view is not None:
            for client in list(self._watchers.clients):
                self._send(client, view)

    def _tell_followers(self) -> None:
        if not self._followers:
            return
        events = self._core.prefix_events()
        if events.cleared or events.stored.size or events.removed.size:
            for client in list(self._followers):
                self._send(client, events)

    def _read(self) -> None:
        self._read_at = time.monotonic()
        while self._socket.poll(0):
            identity, body = self._socket.recv_multipart()
            client = frontend_number(identity)
            self._clients.add(client)
            self._handle(client, self._decoder.decode(body))

    def _handle(self, client: int, message: FrontendMessage) -> None:
        match message:
            case AddRequest():
                self._core.add(client, message)
            case AbortRequests(numbers=numbers):
                self._core.abort(client, numbers)
            case ResetPrefixCache():
                self._core.reset_prefix_cache()
            case FollowPrefixes():
                self._tell_followers()
                self._followers.add(client)
                self._send(client, self._core.cached_prefixes())
            case ReportExpertLoads():
                self._send(client, ExpertLoads(self._core.expert_loads()))
            case WatchSteps(on=on):
                (self._watchers.add if on else self._watchers.discard)(client)

    def _forget_gone(self) -> None:
        """Drop the requests of front-ends whose connection has ended."""
        if not self._ends.poll(0):
            return
        while self._ends.poll(0):
            recv_monitor_message(self._ends)
        # The event does not say whose connection it was: an empty message finds that out.
        for client in list(self._clients):
            self._send(client, Outputs.empty())

    def _send(self, client: int, message: CoreMessage) -> None:
        try:
            self._socket.send_multipart([frontend_identity(client), self._encoder.encode(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._clients.discard(client)
            self._followers.discard(client)
            self._watchers.discard(client)
            self._core.forget(client)


def main() -> int:
    """Run until who started it goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = private_stdout()
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    settings = msgspec.json.decode(line, type=CoreSettings)
    logs.configure(settings.log)
    # A parent that was killed leaves its folder behind.
    folder = Path(settings.address.removeprefix("ipc://")).parent
    end_with_parent(lambda: shutil.rmtree(folder, ignore_errors=True))
    board = Board(Path(settings.board))
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.bind(settings.address)
    try:
        core, link = _start(settings, board, _LoadReports(status))
    except (OctavoError, MemoryError) as error:
        _report(status, Failed(f"{error}" or type(error).__name__))
        return 2
    except Exception as error:
        logger.exception("the engine could not start")
        _report(status, Failed(f"the engine could not start: {type(error).__name__}: {error}"))
        return 1
    _report(status, Ready(core.limits, core.local_pids))
    freeze_start()
    server = CoreServer(core, socket, board, settings.place.rank, link)
    try:
        server.run()
    except Exception as error:
        if not isinstance(error, EngineDeadError):
            logger.exception("the engine has ended")
            error = EngineDeadError(f"the engine has ended: {type(error).__name__}: {error}")
        _report(status, Failed(str(error), core.failed_in_scheduling))
        server.close()
        return 3


class _LoadReports:
    """Tells who started this process how far it is, weights by the percent."""

    def __init__(self, status: BinaryIO) -> None:
        self._status = status
        self._now = Loading("")

    def begin(self, phase: str) -> None:
        """Tell of the next part; counts of tensors stay until all are loaded."""
        whole = self._now.done == self._now.total
        self._tell(Loading(phase) if whole else msgspec.structs.replace(self._now, phase=phase))

    def loaded(self, done: int, total: int) -> None:
        """Tell how many tensors are loaded, and of how many."""
        if self._now.total != total or 100 * done // total != 100 * self._now.done // total:
            self._tell(Loading(self._now.phase, done, total))

    def _tell(self, now: Loading) -> None:
        self._now = now
        _report(self._status, now)


def _start(settings: CoreSettings, board: Board, reports: _LoadReports) -> tuple[EngineCore, RankLink | None]:
    reports.begin("importing libraries")
    # Only now what takes seconds to import: the front-end may end meanwhile.
    from enginecore.core.start import start_core

    config, place = settings.config, settings.place
    reports.begin("finding the model's files")
    files = locate(config.model, config.revision, config.hf_overrides)
    if settings.coordinator is None:
        return start_core(
            config, files, place=place, board=board, on_loaded=reports.loaded, on_phase=reports.begin
        ), None
    from enginecore.data_parallel.link import RankLink
    from enginecore.data_parallel.meeting import Meeting

    registration = RegisterRank(
        rank=place.rank,
        num_ranks=config.data_parallel_size,
        incarnation=place.incarnation,
        num_blocks=0,
        max_num_seqs=config.max_num_seqs,
        group=place.group,
        wave=0 if config.shares_experts else None,
    )
    link = RankLink(settings.coordinator, registration)
    meeting = Meeting(link, place, config.distributed_timeout_seconds)
    core = start_core(
        config,
        files,
        place=place,
        meeting=meeting,
        board=board,
        on_loaded=reports.loaded,
        on_phase=reports.begin,
    )
    link.register(msgspec.structs.replace(registration, num_blocks=core.limits.num_blocks))
    return core, link


def _report(status: BinaryIO, message: Loading | Ready | Failed) -> None:
    status.write(msgspec.json.encode(message) + b"\n")
    status.flush()


if __name__ == "__main__":
    sys.exit(main())
