"""What crosses a process boundary: msgspec structs, sent as msgpack.

Front-ends name a request by a number of their own choosing; text ids stay with them. Arrays travel as
little-endian bytes, so that a step of a thousand rows costs a copy and not a thousand objects.
"""

import msgspec
import numpy as np

from enginecore.sampling_params import SamplingParams

RUNNING, STOP, LENGTH, ABORT, ERROR = range(5)
FINISH_REASONS: tuple[str | None, ...] = (None, "stop", "length", "abort", "error")
"""Finish codes of `Outputs.finished` as a caller reads them."""


class AddRequest(msgspec.Struct, tag="add", array_like=True):
    """Front-end to core: run one sample of a prompt."""

    number: int
    prompt: bytes
    """int32 token ids."""
    params: SamplingParams
    stop_ids: list[int]
    """Every token id that ends the request: EOS ids unless ignored, and the caller's own."""
    max_tokens: int
    seed: int
    cache_salt: str | None = None
    priority: int = 0
    bad_words: list[list[int]] = []
    """`params.bad_words` as token ids."""


class AbortRequests(msgspec.Struct, tag="abort", array_like=True):
    """Front-end to core: forget these requests; no output follows for them."""

    numbers: list[int]


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache", array_like=True):
    """Front-end to core: forget cached prefixes that no request uses."""


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """Front-end to core: here I am; answered with `Ready`."""


FrontendMessage = AddRequest | AbortRequests | ResetPrefixCache | Hello


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log probabilities at consecutive positions: `width` candidates each, the chosen token first."""

    number: int
    width: int
    ids: bytes
    """int32[positions * width]."""
    values: bytes
    """float32[positions * width]."""
    ranks: bytes
    """int32[positions]: the chosen token's rank, 1 for the most likely."""

    def rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ids [positions, width], values [positions, width] and ranks [positions]."""
        ids = np.frombuffer(self.ids, np.int32).reshape(-1, self.width)
        values = np.frombuffer(self.values, np.float32).reshape(-1, self.width)
        return ids, values, np.frombuffer(self.ranks, np.int32)


class EngineStats(msgspec.Struct, array_like=True):
    """The core's state after a step; counters count from its start."""

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    step_tokens: int = 0
    """Tokens that the last step ran."""


class Outputs(msgspec.Struct, tag="outputs", array_like=True):
    """Core to front-end: one step's tokens of that front-end's requests, a column an attribute."""

    numbers: bytes
    """int64[n]; a request that got k tokens stands k times, in order."""
    tokens: bytes
    """int32[n]."""
    finished: bytes
    """int8[n]: a finish code."""
    scheduled: dict[int, tuple[int, float]] = {}
    """By number, for requests that emit their first token: prompt tokens found in the prefix cache, and the
    seconds the request waited before it first ran."""
    logprobs: list[TokenLogprobs] = []
    """At the sampled positions, one entry a token, for requests that asked; in the order of `numbers`."""
    prompt_logprobs: list[TokenLogprobs] = []
    """At consecutive prompt positions, starting with the second token; may come in several pieces."""
    errors: dict[int, str] = {}
    """Requests that the core refused or gave up."""
    stats: EngineStats | None = None

    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return numbers, tokens and finish codes as arrays."""
        return (
            np.frombuffer(self.numbers, np.int64),
            np.frombuffer(self.tokens, np.int32),
            np.frombuffer(self.finished, np.int8),
        )


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """Core to front-end: the model is loaded, with these limits."""

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """Core to front-end: the core cannot go on; `message` says why in one line."""

    message: str


CoreMessage = Outputs | Ready | Failed


def tokens_to_bytes(tokens: list[int] | np.ndarray) -> bytes:
    """Return token ids as int32 bytes."""
    return np.asarray(tokens, dtype=np.int32).tobytes()


def tokens_from_bytes(data: bytes) -> np.ndarray:
    """Return int32 token ids from bytes."""
    return np.frombuffer(data, np.int32)
