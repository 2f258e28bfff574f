"""Tokens of texts, and how the server does."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


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
