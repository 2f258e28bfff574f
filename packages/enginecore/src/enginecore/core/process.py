"""The engine core in a process of its own, behind a ZMQ socket.

Started as `python -m enginecore.core.process` with its settings on standard input; the front-end keeps that
pipe open, and when it closes, because the front-end ended in whatever way, so does this process. It reports
`EngineLimits` or `Failed` as a line of JSON on standard output, and `Failed` as another if later it ends.
"""

from __future__ import annotations

import logging
import math
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn

import msgspec
import zmq

from enginecore import logs
from enginecore.codec import Decoder, Encoder
from enginecore.config import EngineConfig
from enginecore.data_parallel.messages import ALONE, CoordinatorAddress, RankPlace, RegisterRank
from enginecore.errors import EngineDeadError, OctavoError
from enginecore.messages import (
    AbortRequests,
    AddRequest,
    CoreMessage,
    ExpertLoads,
    Failed,
    FrontendMessage,
    Hello,
    ReportExpertLoads,
    ResetPrefixCache,
)
from enginecore.model_files import locate
from enginecore.parent import end_with_parent, private_stdout

if TYPE_CHECKING:
    from enginecore.core.engine_core import EngineCore
    from enginecore.data_parallel.link import RankLink

logger = logging.getLogger(__name__)

_SECONDS_TO_SEND = 1
"""What front-ends have not taken by then of the last messages is dropped."""


class CoreSettings(msgspec.Struct):
    """Settings of the process: one line of JSON on its standard input."""

    config: EngineConfig
    address: str
    """ZMQ endpoint to bind."""
    place: RankPlace = ALONE
    coordinator: CoordinatorAddress | None = None
    log: logs.LogSettings = logs.LogSettings()
    """Those of the front-end: what it logs of this package, this process does too."""


class CoreServer:
    """Reads front-end messages, steps the core, sends each front-end its outputs."""

    def __init__(self, core: EngineCore, socket: zmq.Socket, link: RankLink | None = None) -> None:
        self._core = core
        self._link = link
        self._socket = socket
        self._decoder: Decoder[FrontendMessage] = Decoder(FrontendMessage)
        self._encoder = Encoder()
        self._client_of: dict[bytes, int] = {}
        self._identity_of: dict[int, bytes] = {}

    def run(self) -> NoReturn:
        """Serve until the core fails.

        Raises:
            EngineDeadError: a step failed, or a worker has ended.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for descriptor in self._core.descriptors:
            poller.register(descriptor, zmq.POLLIN)
        if self._link is not None:
            poller.register(self._link.socket, zmq.POLLIN)
        while True:
            self._follow_coordinator()
            if not self._core.has_work:
                poller.poll(None if self._link is None else math.ceil(1000 * self._link.due()))
                self._core.check_workers()
            self._read()
            if self._core.has_work:
                for client, outputs in self._core.step().items():
                    self._send(self._identity_of[client], outputs)

    def _follow_coordinator(self) -> None:
        """Send and take what is on the way between the coordinator and this engine."""
        if self._link is None:
            return
        lockstep = self._core.lockstep
        if lockstep is not None:
            for message in lockstep.messages(self._core.has_unfinished):
                self._link.send(message)
        for message in self._link.receive():
            if lockstep is not None:
                lockstep.receive(message)

    def fail(self, failed: Failed) -> None:
        """Tell every front-end, and close the socket."""
        for identity in self._client_of:
            self._send(identity, failed)
        self._socket.close(linger=1000 * _SECONDS_TO_SEND)

    def _read(self) -> None:
        while self._socket.poll(0):
            identity, body = self._socket.recv_multipart()
            self._handle(identity, self._decoder.decode(body))

    def _handle(self, identity: bytes, message: FrontendMessage) -> None:
        client = self._client_of.setdefault(identity, len(self._client_of))
        self._identity_of[client] = identity
        match message:
            case AddRequest():
                self._core.add(client, message)
            case AbortRequests(numbers=numbers):
                self._core.abort(client, numbers)
            case ResetPrefixCache():
                self._core.reset_prefix_cache()
            case ReportExpertLoads():
                self._send(identity, ExpertLoads(self._core.expert_loads()))
            case Hello():
                self._send(identity, self._core.limits)

    def _send(self, identity: bytes, message: CoreMessage) -> None:
        self._socket.send_multipart([identity, self._encoder.encode(message)])


def main() -> int:
    """Run until the front-end goes away."""
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
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(settings.address)
    try:
        core, link = _start(settings)
    except (OctavoError, MemoryError) as error:
        _report(status, Failed(f"{error}" or type(error).__name__))
        return 2
    except Exception as error:
        logger.exception("the engine could not start")
        _report(status, Failed(f"the engine could not start: {type(error).__name__}: {error}"))
        return 1
    _report(status, core.limits)
    server = CoreServer(core, socket, link)
    try:
        server.run()
    except Exception as error:
        if not isinstance(error, EngineDeadError):
            logger.exception("the engine has ended")
            error = EngineDeadError(f"the engine has ended: {type(error).__name__}: {error}")
        failed = Failed(str(error))
        server.fail(failed)
        _report(status, failed)
        return 3


def _start(settings: CoreSettings) -> tuple[EngineCore, RankLink | None]:
    # Only now what takes seconds to import: the front-end may end meanwhile.
    from enginecore.core.engine_core import start_core

    config = settings.config
    files = locate(config.model, config.revision, config.hf_overrides)
    if settings.coordinator is None:
        return start_core(config, files, settings.place), None
    from enginecore.data_parallel.link import RankLink
    from enginecore.data_parallel.meeting import Meeting

    place = settings.place
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
    core = start_core(config, files, place, Meeting(link, place, config.distributed_timeout_seconds))
    link.register(msgspec.structs.replace(registration, num_blocks=core.limits.num_blocks))
    return core, link


def _report(status: BinaryIO, message: CoreMessage) -> None:
    status.write(msgspec.json.encode(message) + b"\n")
    status.flush()


if __name__ == "__main__":
    sys.exit(main())
