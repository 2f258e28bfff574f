"""Embeddings, scores and rankings."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from octavo_serve.schemas.openai import CachedTokens


class PoolingUsage(msgspec.Struct):
    """Tokens of texts that were embedded."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class EmbeddingEntry(msgspec.Struct):
    """An embedding: numbers, or the base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(msgspec.Struct):
    """The answer of /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingEntry]
    usage: PoolingUsage


class ScoreEntry(msgspec.Struct):
    """How alike the texts of a pair are."""

    index: int
    object: Literal["score"]
    score: float


class Scores(msgspec.Struct):
    """The answer of /score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreEntry]
    usage: PoolingUsage


class RankedText(msgspec.Struct):
    """A document's text."""

    text: str


class RankedDocument(msgspec.Struct):
    """A document by its index in the body, with its score."""

    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Ranking(msgspec.Struct):
    """The answer of /rerank: documents by falling score."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RankedDocument]
