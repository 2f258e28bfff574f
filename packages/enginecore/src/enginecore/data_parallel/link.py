"""The two ends that speak to the coordinator: a rank's, in the core's loop, and a front-end's, in asyncio.

Neither ever waits for the coordinator: what cannot be sent now is sent again or given up.
"""

import math
import time

import msgspec
import zmq
import zmq.asyncio

from enginecore.codec import Decoder, Encoder
from enginecore.data_parallel.connection import prepare
from enginecore.data_parallel.messages import (
    SIGN_OF_LIFE,
    AskStatus,
    CoordinatorAddress,
    GroupAddress,
    LoadReport,
    NeedWave,
    RankMessage,
    RegisterAgain,
    RegisterFrontend,
    RegisterRank,
    Snapshot,
    StartWave,
    Status,
    ToCoordinator,
    ToRank,
    WaveEnded,
)

_REPORT_INTERVAL = 0.02
"""Least seconds from one load report of a rank to the next."""
_REPORT_RATE = 25_000
"""Most load reports a second of all ranks together: from 500 ranks on, each reports less often."""
_RETRY = 0.1
"""Seconds until what could not be sent, for want of a connection, is sent again."""


class _Channel:
    """A socket that sends to the coordinator if it is there, and drops the message otherwise."""

    def __init__(self, address: CoordinatorAddress) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        prepare(self.socket, address.key)
        # Nothing is queued while there is no connection: later it would be out of date.
        self.socket.immediate = True
        self.socket.connect(address.reports)
        self._encoder = Encoder()

    def send(self, message: ToCoordinator) -> bool:
        """Send a message; return whether there was a connection."""
        try:
            self.socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self.socket.close()


class RankLink:
    """A rank's connection to the coordinator, for a loop that must never wait for it.

    Call `receive` once a turn of the loop: it also sends what is due. A loop with nothing to do waits until
    `socket` is readable (with `zmq.Poller`, not by its descriptor), for `due()` seconds at most.
    """

    def __init__(self, address: CoordinatorAddress, registration: RegisterRank) -> None:
        self._channel = _Channel(address)
        self.socket = self._channel.socket
        self._decoder: Decoder[ToRank] = Decoder(ToRank)
        self._registration = registration
        self._interval = max(_REPORT_INTERVAL, registration.num_ranks / _REPORT_RATE)
        self._register_at = 0.0
        self._report_at = 0.0
        self._reported: tuple[int, ...] = ()
        self._load: LoadReport | None = None
        self._address: GroupAddress | None = None
        self._need: NeedWave | None = None

    def register(self, registration: RegisterRank) -> None:
        """Replace what the rank registers with, such as once its model is loaded."""
        self._registration = msgspec.structs.replace(registration, again=self._registration.again)
        self._register_at = 0.0
        self._send_due()

    def report(self, load: LoadReport) -> None:
        """Report a load if it has changed: now, or when the last report is 20 ms old."""
        self._load = load
        self._send_due()

    def send(self, message: NeedWave | WaveEnded | GroupAddress) -> None:
        """Send a message. One that the group depends on is sent again every second, until it has served."""
        if isinstance(message, NeedWave):
            self._need = message
        elif isinstance(message, GroupAddress):
            self._address = message
        else:
            self._registration = msgspec.structs.replace(self._registration, wave=message.wave)
        if not self._channel.send(message):
            self._register_at = min(self._register_at, time.monotonic() + _RETRY)

    def receive(self) -> list[ToRank]:
        """Return the messages that have come, and send what is due."""
        messages: list[ToRank] = []
        while self.socket.get(zmq.EVENTS) & zmq.POLLIN:
            message = self._decoder.decode(self.socket.recv())
            if isinstance(message, RegisterAgain):
                self._register_at = 0.0
                self._reported = ()
                continue
            if isinstance(message, StartWave) and self._need is not None and message.wave > self._need.wave:
                self._need = None
            messages.append(message)
        self._send_due()
        return messages

    def due(self) -> float:
        """Return the seconds until something is to be sent; `receive` sends it."""
        now = time.monotonic()
        at = self._register_at if self._changed() is None else min(self._register_at, self._report_at)
        return max(at - now, 0.0)

    def close(self) -> None:
        """Close the connection; what was not sent is dropped."""
        self._channel.close()

    def _send_due(self) -> None:
        now = time.monotonic()
        if now >= self._register_at:
            self._register_at = now + (SIGN_OF_LIFE if self._register() else _RETRY)
        load = self._changed()
        if load is not None and now >= self._report_at:
            self._report_at = now + self._interval
            if self._channel.send(load):
                self._reported = _measures(load)

    def _changed(self) -> LoadReport | None:
        """Return the load if it is to be sent."""
        return self._load if self._load is not None and _measures(self._load) != self._reported else None

    def _register(self) -> bool:
        """Send the registration and what must not be lost; return whether there was a connection."""
        messages: list[RankMessage | None] = [self._registration, self._address, self._need]
        sent = all(self._channel.send(message) for message in messages if message is not None)
        if sent and not self._registration.again:
            self._registration = msgspec.structs.replace(self._registration, again=True)
        return sent


class FrontendLink:
    """A front-end's connection to the coordinator, for asyncio."""

    def __init__(self, address: CoordinatorAddress, index: int) -> None:
        self._channel = _Channel(address)
        self._snapshots = zmq.asyncio.Context.instance().socket(zmq.SUB)
        prepare(self._snapshots, address.key)
        # A reader that was busy gets the newest.
        self._snapshots.conflate = True
        self._snapshots.subscribe(b"")
        self._snapshots.connect(address.snapshots)
        self._decoder: Decoder[Snapshot] = Decoder(Snapshot)
        self._registration = RegisterFrontend(index)
        self._register_at = 0.0

    async def receive(self) -> Snapshot:
        """Return the next snapshot, however long the coordinator is away."""
        while True:
            now = time.monotonic()
            if now >= self._register_at:
                sent = self._channel.send(self._registration)
                self._register_at = now + (SIGN_OF_LIFE if sent else _RETRY)
            if await self._snapshots.poll(math.ceil(1000 * (self._register_at - now))):
                return self._decoder.decode(await self._snapshots.recv())

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()
        self._snapshots.close()


def ask_status(address: CoordinatorAddress, timeout: float = 5.0) -> Status | None:
    """Ask a coordinator for its status; None if it has not answered within `timeout` seconds."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        prepare(socket, address.key)
        socket.connect(address.reports)
        socket.send(Encoder().encode(AskStatus()))
        if not socket.poll(int(1000 * timeout)):
            return None
        return Decoder(Status).decode(socket.recv())


def _measures(load: LoadReport) -> tuple[int, ...]:
    return load.waiting, load.running, load.free_blocks, load.tokens, load.steps
