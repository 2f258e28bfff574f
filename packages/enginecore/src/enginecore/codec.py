"""msgpack for what crosses processes: numpy arrays as raw bytes, nothing pickled.

A message is built from the types that its reader declares; no bytes can make it build anything else.
"""

from functools import lru_cache
from typing import Any, Generic, TypeVar, get_args, get_origin

import msgspec
import numpy as np

_CODES = {np.dtype(code): code for code in ("<i8", "<i4", "i1", "<f4", "?")}

Message = TypeVar("Message")


class Encoder:
    """Encodes structs, named tuples and what they hold; arrays are int64, int32, int8, float32 or bool."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)

    def encode(self, message: Any) -> bytes:
        """Return `message` as msgpack.

        Raises:
            TypeError: it holds something that does not cross, or an array of another type.
        """
        return self._encoder.encode(message)


class Decoder(Generic[Message]):
    """Decodes messages of one type, such as a union of tagged structs."""

    def __init__(self, kind: Any) -> None:
        """`kind` declares arrays as `NDArray[np.int32]` and the like."""
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)

    def decode(self, data: bytes | bytearray | memoryview) -> Message:
        """Return the message; its arrays are read-only views of `data`.

        Raises:
            msgspec.DecodeError: `data` is not such a message, or an array is not of the declared type.
        """
        return self._decoder.decode(data)


def _encode_array(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} does not cross to other processes")
    code = _CODES.get(value.dtype)
    if code is None:
        raise TypeError(f"arrays of {value.dtype} do not cross to other processes")
    return code, value.shape, value.tobytes()


def _decode_array(kind: Any, value: Any) -> np.ndarray:
    code, shape, data = value
    declared = _declared_dtype(kind)
    if _CODES.get(declared) != code:
        raise ValueError(f"an array of {declared} is expected, this one is {code!r:.20}")
    return np.frombuffer(data, declared).reshape(shape)


@lru_cache(maxsize=16)
def _declared_dtype(kind: Any) -> np.dtype:
    """Return the dtype of an annotation `NDArray[scalar]`, which is `ndarray[shape, dtype[scalar]]`."""
    if get_origin(kind) is not np.ndarray:
        raise TypeError(f"{kind} does not cross from other processes")
    return np.dtype(get_args(get_args(kind)[1])[0])
