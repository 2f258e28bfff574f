"""Messages between the core and its workers, and their encoding: msgpack, arrays as raw bytes, no pickle.

Every type is known to the reader from the declarations in `executor.step` and here; no message can make it
build anything else.
"""

import time
import traceback
from typing import Any

import msgspec
import numpy as np

from enginecore.config import EngineConfig
from enginecore.executor.step import StepInput, StepOutput

_DTYPES = {"i": np.dtype("<i4"), "f": np.dtype("<f4"), "?": np.dtype("?")}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class LinkSettings(msgspec.Struct):
    """Address of the core's end of a link; see `executor.link`."""

    down: str
    """ZMQ endpoint that settings and steps come from."""
    up: str
    """ZMQ endpoint that messages go to."""
    key: str | None
    """The core's public CURVE key in Z85, made for this link: whoever knows it may connect. None over ipc."""
    timeout: float
    """Seconds in which to connect."""


class WorkerSettings(msgspec.Struct):
    """First message from the core to a worker."""

    config: EngineConfig
    """`model` is a path on the worker's host."""
    rank: int
    tp: int
    pp: int
    host: str
    """Address of the worker's host at which the other ranks reach it."""
    local_rank: int
    """Index among the ranks of its host that see the same devices: which of them is its own."""
    local_size: int
    """Ranks on its host, which share its memory and cores."""
    rendezvous: str
    """host:port where rank 0 listens for the others; empty for rank 0, which is to listen on `host`."""
    ring: str | None
    """Address of the ring that brings the steps; None: they come over the link."""
    reader: int
    """Index among the readers of the ring."""


class ReportExpertLoads(msgspec.Struct, tag="report_expert_loads"):
    """Core to workers, among the steps: say how many tokens went to each expert in those before."""


class ExpertLoads(msgspec.Struct, tag="expert_loads", array_like=True):
    """Worker to core: the sum over all ranks, a list for each layer with experts; None if there is none."""

    layers: list[list[int]] | None


class Listening(msgspec.Struct, tag="listening", array_like=True):
    """Rank 0 to core: it listens for the other ranks."""

    rendezvous: str
    """host:port."""


class Progress(msgspec.Struct, tag="progress", array_like=True):
    """Worker to core: a part of starting is done."""

    text: str


class Loaded(msgspec.Struct, tag="loaded", array_like=True):
    """Worker to core: ready for steps, with these limits, which are the same on every rank."""

    num_blocks: int
    host_blocks: int
    window: int | None
    max_model_len: int
    vocab_size: int
    on_cpu: bool


class Failure(msgspec.Struct, tag="failure", array_like=True):
    """Worker to core: it ends with an exception."""

    kind: str
    """Name of the exception's class."""
    message: str
    traceback: str
    at: int
    """Nanoseconds of the host's monotonic clock, which its processes share."""

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Return the message for an exception that is being handled."""
        lines = traceback.format_exception(error)
        return cls(type(error).__name__, str(error), "".join(lines), time.monotonic_ns())


class StepDone(msgspec.Struct, tag="step", array_like=True):
    """Worker to core: a step's results."""

    output: StepOutput


WorkerMessage = Listening | Progress | Loaded | Failure | StepDone | ExpertLoads


def _encode_array(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"{type(value).__name__} does not cross to other processes")
    code = _CODES.get(value.dtype)
    if code is None:
        raise TypeError(f"arrays of int32, float32 and bool cross to other processes, not {value.dtype}")
    return code, value.shape, value.tobytes()


def _decode_array(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise NotImplementedError(f"{kind.__name__} does not cross from other processes")
    code, shape, data = value
    return np.frombuffer(data, _DTYPES[code]).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_steps = msgspec.msgpack.Decoder(StepInput | ReportExpertLoads, dec_hook=_decode_array)
_messages = msgspec.msgpack.Decoder(WorkerMessage, dec_hook=_decode_array)


def encode_step(step: StepInput | ReportExpertLoads) -> bytes:
    """Return a step, or what is asked between steps, as bytes.

    Raises:
        TypeError: an array is neither int32, float32 nor bool.
    """
    return _encoder.encode(step)


def decode_step(data: bytes) -> StepInput | ReportExpertLoads:
    """Return the step or request that `data` holds; its arrays are read-only."""
    return _steps.decode(data)


def encode_message(message: WorkerMessage) -> bytes:
    """Return what a worker says as bytes; TypeError as for `encode_step`."""
    return _encoder.encode(message)


def decode_message(data: bytes | bytearray | memoryview) -> WorkerMessage:
    """Return what a worker said; arrays are read-only."""
    return _messages.decode(data)
