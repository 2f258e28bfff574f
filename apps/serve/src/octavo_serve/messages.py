"""Messages between the supervisor and its HTTP processes, as lines of JSON."""

import msgspec

from enginecore import EngineConfig, logs
from enginecore.data_parallel.messages import CoordinatorAddress
from octavo_serve.config import ServeConfig

COUNTS = "counts"
"""File in which all HTTP processes count what limits are about; see `octavo_serve.limits`."""
RESPONSES = "responses"
"""Folder of stored responses; see `octavo_serve.response_store`."""


class HttpSettings(msgspec.Struct):
    """Settings of an HTTP process."""

    engine: EngineConfig
    server: ServeConfig
    listener: int
    """Descriptor of the socket that all HTTP processes accept from."""
    index: int
    """Among the HTTP processes."""
    number: int
    """As a front-end; a process that takes another's place has another number."""
    boards: dict[int, str]
    """Path of each rank's board."""
    coordinator: CoordinatorAddress | None
    shared: str
    """Folder that all HTTP processes share, with COUNTS and RESPONSES."""
    metrics: str
    """Folder in which all HTTP processes count."""
    at_once: bool
    """Whether it accepts connections while the model loads, to say so; else only once it takes requests."""
    started: int
    """When the server was started, in seconds since the epoch: what is shown as the model's creation."""
    log: logs.LogSettings


class HttpReady(msgspec.Struct, tag="ready"):
    """HTTP process to supervisor: it takes requests."""


class HttpFailed(msgspec.Struct, tag="failed"):
    """HTTP process to supervisor: it cannot start; `message` says why in one line."""

    message: str


class ReloadExperts(msgspec.Struct, tag="reload_experts"):
    """HTTP process to supervisor: read the placement of experts again."""


HttpMessage = HttpReady | HttpFailed | ReloadExperts
