"""Messages between the core and its workers, sent as msgpack by `enginecore.codec`."""

import time
import traceback

import msgspec

from enginecore.codec import Decoder, Encoder
from enginecore.config import EngineConfig
from enginecore.data_parallel.messages import ALONE, RankPlace
from enginecore.executor.step import StepInput, StepOutput
from enginecore.logs import LogSettings
from enginecore.messages import EngineLimits, ExpertLoads


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
    """host:port where rank 0 listens for the others; empty for that, which is to listen on `host`."""
    ring: str | None
    """Address of the ring that brings the steps; None: they come over the link."""
    reader: int
    """Index among the readers of the ring."""
    place: RankPlace = ALONE
    """The core's place among those that share the requests."""
    log: LogSettings = LogSettings()


class CountExperts(msgspec.Struct, tag="count_experts"):
    """Core to workers, among the steps: tell how many tokens went to each expert in those before."""


class Listening(msgspec.Struct, tag="listening", array_like=True):
    """Rank 0 to core: it listens for the other ranks."""

    rendezvous: str
    """host:port."""


class Progress(msgspec.Struct, tag="progress", array_like=True):
    """Worker to core: a part of starting begins."""

    text: str


class Loaded(msgspec.Struct, tag="loaded", array_like=True):
    """Rank 0 to core: so many of its tensors are loaded."""

    done: int
    total: int


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


WorkerMessage = Listening | Progress | Loaded | EngineLimits | Failure | StepDone | ExpertLoads
"""`EngineLimits` says that the worker is ready for steps."""

_encoder = Encoder()
_steps: Decoder[StepInput | CountExperts] = Decoder(StepInput | CountExperts)
_messages: Decoder[WorkerMessage] = Decoder(WorkerMessage)


def encode_step(step: StepInput | CountExperts) -> bytes:
    """Return a step, or what is asked between steps, as bytes."""
    return _encoder.encode(step)


def decode_step(data: bytes) -> StepInput | CountExperts:
    """Return the step or request that `data` holds; its arrays are read-only."""
    return _steps.decode(data)


def encode_message(message: WorkerMessage) -> bytes:
    """Return a worker's message as bytes."""
    return _encoder.encode(message)


def decode_message(data: bytes | bytearray | memoryview) -> WorkerMessage:
    """Return a worker's message; its arrays are read-only."""
    return _messages.decode(data)
