"""Outputs of an engine."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Logprob:
    """One token's natural-log probability under the unmodified model distribution."""

    logprob: float
    rank: int | None = None
    """1 for the most likely token of the vocabulary."""
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    """None while running, then "stop", "length", "abort" or "error"."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; after an error its message; otherwise None."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds since the epoch, and its drafts, of all samples."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    time_in_queue: float | None = None
    """Seconds from arrival to the first step."""
    num_draft_tokens: int = 0
    """Draft tokens that were verified."""
    num_accepted_tokens: int = 0
    """Those of them that were what was sampled. A stop string may lie before the last ones."""


@dataclass(slots=True)
class RequestOutput:
    """A request with its samples so far (or, with DELTA, since the last output)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    embedding: NDArray[np.float32] | None = None
    """[hidden], of a request for one once it has finished. Its only sample has no token then."""


@dataclass(slots=True)
class EmbeddingOutput:
    """A vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """The embedding of a prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


@dataclass(slots=True)
class ScoringOutput:
    """How alike two texts are."""

    score: float
    """Cosine of their embeddings, -1 to 1."""


@dataclass(slots=True)
class ScoringRequestOutput:
    """The score of a pair of texts."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    """Of the first text, then of the second."""
    num_cached_tokens: int
    finished: bool = True
