"""One front-end's connection to a core. Needs no torch."""

import asyncio

import zmq
import zmq.asyncio

from enginecore.codec import Decoder, Encoder
from enginecore.core.identity import frontend_identity
from enginecore.errors import EngineDeadError
from enginecore.messages import CoreMessage, FrontendMessage


class CoreClient:
    """One front-end's connection to one core, for as long as that lives."""

    def __init__(self, address: str, frontend: int) -> None:
        """`frontend` is the front-end's number among those of the core."""
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, frontend_identity(frontend))
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.connect(address)
        self._encoder = Encoder()
        self._decoder: Decoder[CoreMessage] = Decoder(CoreMessage)

    def send(self, message: FrontendMessage) -> None:
        """Queue a message; it leaves in the background, in order."""
        sent = self._socket.send(self._encoder.encode(message))
        if isinstance(sent, asyncio.Future):
            sent.add_done_callback(_raise_failure)

    async def receive(self) -> CoreMessage:
        """Return the next message."""
        return self._decoder.decode(await self._socket.recv())

    @property
    def has_more(self) -> bool:
        """Whether `receive` would return without waiting."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def close(self) -> None:
        """Close the connection; what was not sent is dropped."""
        self._socket.close()


def _raise_failure(sent: asyncio.Future) -> None:
    if not sent.cancelled() and sent.exception() is not None:
        raise EngineDeadError("a message to the engine could not be sent") from sent.exception()
