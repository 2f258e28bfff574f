"""Tokens of texts, and how the server does."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from octavo_serve.schemas.openai import Error


class Tokens(msgspec.Struct):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizedText(msgspec.Struct):
    """The answer of /detokenize."""

    prompt: str


class Health(msgspec.Struct):
    """Requests are run; `ranks_down` has the reasons for ranks that are not up."""

    status: Literal["ok", "degraded"]
    ranks_down: dict[str, str] | UnsetType = UNSET


class LoadProgress(msgspec.Struct):
    """Progress of the rank that has come the least far, of `ranks_loading`; `percent` is of its tensors."""

    phase: str
    percent: int | None
    elapsed_seconds: float
    ranks_loading: int


class Unhealthy(Error):
    """Why no request is run, and the progress of ranks that load the model."""

    loading: LoadProgress | UnsetType = UNSET


class Version(msgspec.Struct):
    """The server's version."""

    version: str


class Load(msgspec.Struct):
    """How busy the server is."""

    server_load: int
    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float


class Reloading(msgspec.Struct):
    """Ranks start again."""

    status: Literal["reloading"]
