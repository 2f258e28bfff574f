"""Frames of the WebSocket /v1/stream, in both directions; see `octavo_serve.routes.stream`."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from octavo_serve.schemas.openai import ChatChunk, CompletionChunk, ErrorFields, Usage
from octavo_serve.schemas.service import LoadProgress


class CancelFrame(msgspec.Struct, tag="cancel"):
    """Abort the request or the watch of this id."""

    id: str


class WatchFrame(msgspec.Struct, tag="watch"):
    """Send the engine's state twice a second, until it is cancelled."""

    id: str


class AuthFrame(msgspec.Struct, tag="auth"):
    """The API key, of a client that sent none in the headers; the first frame."""

    key: str


class CompletionChunkFrame(CompletionChunk, kw_only=True):
    """The next piece of a completion."""

    type: Literal["chunk"]


class ChatChunkFrame(ChatChunk, kw_only=True):
    """The next piece of a chat completion."""

    type: Literal["chunk"]


class DoneFrame(msgspec.Struct, tag="done"):
    """The end of a request, with its tokens, or of a watch, which has none."""

    id: str
    usage: Usage | None


class ErrorFrame(msgspec.Struct, tag="error"):
    """The end of the request of this id; about a frame, and no request's end, where the id is null."""

    id: str | None
    error: ErrorFields


class LatencySummary(msgspec.Struct):
    """Percentiles of a latency over the last minute, in seconds; null without values."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None


class RankState(msgspec.Struct):
    """State of a rank; counters count from the server's start.

    `steps` are those since the last frame, `blocks` a digit for each cell of the block map.
    """

    rank: int
    down: str | None
    running: int
    waiting: int
    free_blocks: int
    num_blocks: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    prompt_tokens: int
    generation_tokens: int
    num_steps: int | UnsetType = UNSET
    steps: list[list[float]] | UnsetType = UNSET
    blocks: str | UnsetType = UNSET
    block_totals: list[int] | UnsetType = UNSET


class EngineFrame(msgspec.Struct, tag="engine"):
    """State of the engine; `time` is monotonic and in seconds, `trouble` why no request is run now."""

    id: str
    time: float
    trouble: str | None
    loading: LoadProgress | None
    version: str
    models: list[str]
    max_model_len: int | None
    latencies: dict[Literal["ttft", "itl"], LatencySummary]
    ranks: list[RankState]
