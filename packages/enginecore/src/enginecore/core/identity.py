"""Names of front-ends on a core's socket, and of their requests in a core."""

import struct

_IDENTITY = struct.Struct(">cI")
_LETTER = b"f"
"""As no identity may begin with a zero."""

NUMBER_BITS = 40
"""A request's handle is its front-end above this bit and the front-end's own number below it."""
NUMBER_MASK = (1 << NUMBER_BITS) - 1


def split_handle(handle: int) -> tuple[int, int]:
    """Return the front-end of a request and the front-end's number for it."""
    return handle >> NUMBER_BITS, handle & NUMBER_MASK


def frontend_identity(number: int) -> bytes:
    """Return the ZMQ identity of front-end `number`."""
    return _IDENTITY.pack(_LETTER, number)


def frontend_number(identity: bytes) -> int:
    """Return the number of the front-end with this identity."""
    return _IDENTITY.unpack(identity)[1]
