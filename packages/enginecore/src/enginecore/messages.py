"""Messages between front-ends and engine cores, sent as msgpack by `enginecore.codec`.

Front-ends name a request by a number of their own choosing; text ids stay with them. Arrays travel as bytes,
so that a step of a thousand rows costs a copy and not a thousand objects.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginecore.pooling_params import Pooling
from enginecore.sampling_params import SamplingParams

RUNNING, STOP, LENGTH, ABORT, ERROR = range(5)
FINISH_REASONS: tuple[str | None, ...] = (None, "stop", "length", "abort", "error")
"""Finish codes of `Outputs.finished` as a caller reads them."""

NO_TOKENS: NDArray[np.int32] = np.empty(0, np.int32)


class Guide(msgspec.Struct, array_like=True):
    """A grammar for what is generated, from the prompt's end on."""

    grammar: str
    """In llguidance's Lark or JSON form."""
    may_end: bool
    """Whether a stop id may come wherever the grammar may end, or only where it can do nothing else."""


class RowSampling(msgspec.Struct, array_like=True):
    """Sampling parameters of one sample, resolved against the model: what a worker keeps for its row."""

    params: SamplingParams
    stop_ids: list[int]
    """Every token id that ends the request: EOS ids unless ignored, and the caller's own. With a guide
    there is at least one: EOS ids where there would be none."""
    bad_words: list[list[int]]
    """`params.bad_words` as token ids."""
    seed: int
    prompt_logprobs_done: int = 0
    """Prompt positions whose log probabilities have been reported already."""
    pooling: Pooling | None = None
    """The request ends with its prompt, whose hidden states are pooled; no token is sampled."""
    guide: Guide | None = None
    """`params.structured_outputs` as a grammar; the parameters themselves are left out then."""


class AddRequest(msgspec.Struct, tag="add", array_like=True):
    """Front-end to core: run one sample of a prompt."""

    number: int
    prompt: NDArray[np.int32]
    max_tokens: int
    """Counted from the prompt's end, `generated` included."""
    sampling: RowSampling
    generated: NDArray[np.int32] = NO_TOKENS
    """Tokens that were generated before, elsewhere: the request is resumed after them."""
    cache_salt: str | None = None
    priority: int = 0
    age: float = 0.0
    """Seconds since the request came to the front-end."""
    counted: bool = False
    """Whether its prompt has run before, elsewhere, and been counted there."""
    alone: bool = False
    """Whether it has been in two steps that ended a core: it runs in steps of its own until it has shown
    that it does no harm."""


class AbortRequests(msgspec.Struct, tag="abort", array_like=True):
    """Front-end to core: forget these requests; no output follows for them."""

    numbers: list[int]


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache", array_like=True):
    """Front-end to core: forget cached prefixes that no request uses."""


class FollowPrefixes(msgspec.Struct, tag="follow_prefixes", array_like=True):
    """Front-end to core: send `KVEvents` from now on, first of all that is cached."""


class ReportExpertLoads(msgspec.Struct, tag="report_expert_loads", array_like=True):
    """Front-end to core: answered with `ExpertLoads`."""


class WatchSteps(msgspec.Struct, tag="watch_steps", array_like=True):
    """Front-end to core: send `StepsView` from now on, or no longer."""

    on: bool


FrontendMessage = (
    AddRequest | AbortRequests | ResetPrefixCache | FollowPrefixes | ReportExpertLoads | WatchSteps
)


class PositionLogprobs(NamedTuple):
    """Log probabilities at consecutive positions of one request, the actual token's first."""

    ids: NDArray[np.int32]
    """[positions, candidates]."""
    values: NDArray[np.float32]
    """[positions, candidates]."""
    ranks: NDArray[np.int32]
    """[positions]: the actual token's rank, 1 for the most likely."""


class PooledRows(NamedTuple):
    """Parts of pooled vectors, of k requests: those of the positions that one step has run."""

    rows: NDArray[np.int64]
    """[k]: rows of the step; to a front-end, the requests' numbers."""
    starts: NDArray[np.int32]
    """[k]: the first of a request's positions that the step has run."""
    counts: NDArray[np.int32]
    """[k]: how many it has run."""
    vectors: NDArray[np.float32]
    """[k, hidden]: for `mean` the sum of their hidden states, for `last` that of the last one."""

    def only(self, picked: NDArray[np.bool_]) -> "PooledRows":
        """Return the requests that `picked` bool [k] says."""
        rows, starts, counts, vectors = self
        return PooledRows(rows[picked], starts[picked], counts[picked], vectors[picked])


class EngineLimits(msgspec.Struct, tag="limits", array_like=True, frozen=True):
    """Limits of a loaded model, the same on every rank: reported by workers, and by a core that is ready."""

    max_model_len: int
    """Most tokens of a request, prompt and generated ones together."""
    vocab_size: int
    num_blocks: int
    """KV cache blocks on the device."""
    block_size: int
    """Tokens in a block."""
    host_blocks: int = 0
    """KV cache blocks in host memory, for what is swapped out or evicted."""
    window: int | None = None
    """The sliding window that all layers have; None where some layer attends to everything."""
    device: str = "cpu"
    """Type of the device: cpu or cuda."""
    dynamic_length: int | None = None
    """Prompt tokens beyond which keys depend on the prompt's length (dynamic NTK scaling); None: never."""
    dtype: str = ""
    """Type of weights and activations."""
    lockstep: bool = False
    """Whether the engines share experts: they run together, and none goes on without the others."""
    hidden_size: int = 0
    """Numbers of a hidden state, and of an embedding."""


STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets in which steps are counted by their tokens."""


class EngineStats(msgspec.Struct, array_like=True):
    """An engine's state after a step, or the sum of several engines'; counters count from its start."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    num_blocks: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    ran_tokens: int = 0
    """Tokens that steps ran, prompts' and generated ones."""
    num_drafts: int = 0
    """Drafts that were verified, each of one or more tokens of a request."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    step_buckets: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_BOUNDS) + 1))
    """Steps by their tokens: those up to each of STEP_BOUNDS, above the one before; the last are larger."""

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV cache blocks in use, 0 to 1."""
        return 1 - self.free_blocks / self.num_blocks if self.num_blocks else 0.0

    def __add__(self, other: "EngineStats") -> "EngineStats":
        totals = {
            name: getattr(self, name) + getattr(other, name)
            for name in self.__struct_fields__
            if name != "step_buckets"
        }
        buckets = [a + b for a, b in zip(self.step_buckets, other.step_buckets, strict=True)]
        return EngineStats(**totals, step_buckets=buckets)


class Outputs(msgspec.Struct, tag="outputs", array_like=True):
    """Core to front-end: one step's tokens of that front-end's requests, a column an attribute."""

    numbers: NDArray[np.int64]
    """[n]; a request that got k tokens stands k times, in order."""
    tokens: NDArray[np.int32]
    """[n]."""
    finished: NDArray[np.int8]
    """[n]: a finish code."""
    scheduled: dict[int, tuple[int, float]] = {}
    """By number, for requests that first ran in this step: prompt tokens found in the prefix cache, and
    seconds in the queue."""
    logprobs: Sequence[tuple[int, PositionLogprobs]] = ()
    """By number, at the sampled positions: one entry a token, for requests that asked, in order."""
    prompt_logprobs: Sequence[tuple[int, PositionLogprobs]] = ()
    """By number, at consecutive prompt positions from the second on; may come in several pieces."""
    errors: dict[int, str] = {}
    """Requests that the core refused."""
    pooled: PooledRows | None = None
    """By number. A request that is pooled has one token, of no meaning, once all its positions have run."""
    drafted: dict[int, tuple[int, int]] = {}
    """By number, for requests whose drafts this step ran: how many, and how many of them were accepted."""

    @classmethod
    def empty(cls) -> "Outputs":
        """Return outputs of no request."""
        return cls(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int8))


class ExpertLoads(msgspec.Struct, tag="expert_loads", array_like=True):
    """Core to front-end, and worker to core: tokens that went to each expert since the start.

    Each core counts those of its own requests, also where cores share experts, and each worker those that no
    other counts: the sums are over all.
    """

    tokens: NDArray[np.int64] | None
    """[layers with experts, experts]; None for a model without experts."""


class KVEvents(msgspec.Struct, tag="kv_events", array_like=True):
    """Core to front-end: changes of its prefix cache, in 8-byte keys; see `data_parallel.prefixes`."""

    stored: NDArray[np.int64]
    removed: NDArray[np.int64]
    """None of them is in `stored`."""
    cleared: bool = False
    """Whether all keys of before have gone; it comes before the others."""


STEP_COLUMNS = ("prefill", "decode", "rows", "idle", "plan", "run", "deliver")
"""Columns of `StepsView.steps`: tokens of prompts and of generation; rows; and seconds since the step before:
without work, in planning and taking requests in, in the workers, and in handing tokens out."""

WATCHED_STEPS = 200
"""Steps that are kept for who watches."""


class StepsView(msgspec.Struct, tag="steps_view", array_like=True):
    """Core to front-end: what a page shows of an engine beside `EngineStats`."""

    steps: NDArray[np.float32]
    """[n, STEP_COLUMNS]: those since the last view, of which the newest 200."""
    blocks: NDArray[np.int8] | None = None
    """[cells]: states of the KV cache's blocks as `BlockPool.states` has them, or, in a large pool, the most
    frequent one of as many consecutive blocks each; None where the view before is recent."""
    totals: list[int] = []
    """Blocks by state, with `blocks`."""


CoreMessage = Outputs | KVEvents | ExpertLoads | StepsView


class Ready(msgspec.Struct, tag="ready"):
    """Core to who started it: the model is loaded."""

    limits: EngineLimits
    pids: list[int] = []
    """Of the workers on this host that are processes of their own."""


class Loading(msgspec.Struct, tag="loading"):
    """Core to who started it: the part of its start that it is at, and how much of it is done."""

    phase: str
    """In a few words, such as "reading weights"."""
    done: int = 0
    """Tensors loaded so far."""
    total: int = 0
    """Of so many; 0 where there is nothing to count."""


class Failed(msgspec.Struct, tag="failed"):
    """Core to who started it: it cannot go on; `message` says why in one line."""

    message: str
    in_scheduling: bool = False
    """Whether that was within the scheduler or its policy: no device has to do with it."""


class RankLoading(msgspec.Struct, tag="loading"):
    """Supervisor to front-end: how far a rank is that starts, or starts again."""

    rank: int
    incarnation: int
    began: float
    """When it was started, in seconds of the host's monotonic clock."""
    progress: Loading


class RankUp(msgspec.Struct, tag="up"):
    """Supervisor to front-end: a rank takes requests."""

    rank: int
    incarnation: int
    address: str
    """ZMQ endpoint, another one each time that the rank is started."""
    limits: EngineLimits


class RankDown(msgspec.Struct, tag="down"):
    """Supervisor to front-end: a rank has ended with all that was in it; it is started again."""

    rank: int
    incarnation: int
    reason: str
    suspects: list[tuple[int, int]] = []
    """Front-end and number of each request in the steps under way at its end."""
    alone: bool = False
    """Whether that was a trial of one request."""


class RankOut(msgspec.Struct, tag="out"):
    """Supervisor to front-end: a rank is not started again; `reason` says why in one line."""

    rank: int
    reason: str
    ever_up: bool = True
    """Whether it has ever loaded the model."""


RankChange = RankUp | RankDown | RankOut
RankEvent = RankLoading | RankChange
