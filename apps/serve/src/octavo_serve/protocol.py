"""HTTP on a connection: uvicorn's, answers to HTTP/1.0, and parts of a body that are written at once."""

from collections.abc import Awaitable, Callable
from typing import Any
from weakref import ref

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo_serve.errors import ApiError

CYCLE = "octavo.cycle"
"""Key of a weak reference to the connection's request and answer in the ASGI scope, which they hold."""


class BodyWriter:
    """Writes to the body of an answer that has begun and whose length is not known.

    A call in place of the coroutines of every layer that `send` goes through, for who writes thousands of
    small parts a second.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @classmethod
    def of(cls, scope: Scope) -> "BodyWriter | None":
        """Return the writer of a request's answer; None where another server runs the application."""
        reference = scope.get(CYCLE)
        cycle = None if reference is None else reference()
        return None if cycle is None else cls(cycle)

    @property
    def is_open(self) -> bool:
        """Whether the body has begun, its client is there, and what was written is on its way."""
        cycle = self._cycle
        return (
            cycle.response_started
            and not cycle.flow.write_paused
            and not cycle.disconnected
            and not cycle.response_complete
        )

    def write(self, part: bytes) -> None:
        """Write a part, which is not empty."""
        cycle = self._cycle
        if cycle.chunked_encoding:
            part = b"%x\r\n%b\r\n" % (len(part), part)
        cycle.transport.write(part)


_MOST_HEAD_BYTES = 64 << 10
"""Of the request line and headers, or of trailers, while they are incomplete: the parser keeps them all."""

_ERROR = ApiError(431, f"the request line and headers are larger than {_MOST_HEAD_BYTES} bytes").body()
_HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_ERROR), _ERROR)
)


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's, with bounded heads, and without chunks for clients of HTTP/1.0.

    Those know none (RFC 9112, section 6.1).
    """

    _num_unfinished = 0
    """Bytes that came since the parser last had a whole head or a part of a body."""

    def data_received(self, data: bytes) -> None:
        self._num_unfinished += len(data)
        super().data_received(data)
        if self._num_unfinished > _MOST_HEAD_BYTES and not self.transport.is_closing():
            self._refuse_head()

    def on_message_begin(self) -> None:
        self._num_unfinished = 0
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        self._num_unfinished = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unfinished = 0
        super().on_message_complete()

    def on_headers_complete(self) -> None:
        self._num_unfinished = 0
        super().on_headers_complete()
        if self.cycle is not None:
            self.scope[CYCLE] = ref(self.cycle)  # ty: ignore[invalid-typed-dict-key]
        if self.scope["http_version"] == "1.0" and self.cycle is not None:
            self.cycle.send = _until_close(self.cycle)  # ty: ignore[invalid-assignment]

    def handle_websocket_upgrade(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # The handshake would stand in the middle of that answer, and nobody would see its client leave.
            self.transport.close()
        else:
            super().handle_websocket_upgrade()

    def _refuse_head(self) -> None:
        """Close the connection, with an answer where none is being made or sent."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_HEAD_TOO_LARGE)
        self.transport.close()


def _until_close(cycle: RequestResponseCycle) -> Callable[[Any], Awaitable[None]]:
    """Return a `send` whose body, where its length is not known, lasts until the connection is closed."""
    send = cycle.send
    has_length = True

    async def send_message(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            # What the protocol checks the body against.
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_message
