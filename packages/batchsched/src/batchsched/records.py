"""Records exchanged with the scheduler: limits, requests, step plans, results, load and errors."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchsched.memory import Memory

MAX_ID = 2**31 - 1


class RequestRefused(ValueError):
    """The request is invalid or can never run. The message says what was asked and what would be right."""


class PromptTooLong(RequestRefused):
    """The prompt leaves no position for a token to generate: it is not shorter than `max_model_len`."""

    def __init__(self, length: int, max_model_len: int) -> None:
        super().__init__(
            f"the prompt has {length} tokens and the model's context {max_model_len}: "
            f"a prompt of at most {max_model_len - 1} leaves room for a token"
        )


class NeverFits(RequestRefused):
    """The request needs more blocks than there are, even if it ran alone."""

    def __init__(self, needed: int, num_blocks: int) -> None:
        super().__init__(
            f"the prompt and the tokens asked for need {needed} KV blocks and there are {num_blocks}: "
            "shorten the prompt, lower max_tokens, or give the cache more memory"
        )


class DuplicateHandle(RequestRefused):
    """A request with this handle is waiting or running."""

    def __init__(self, handle: int) -> None:
        super().__init__(f"a request with handle {handle} is waiting or running: choose another handle")


class StepMismatch(ValueError):
    """The result does not belong to the oldest step in flight."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds every plan keeps.

    max_num_seqs: rows, that is requests that hold memory at once.
    max_num_batched_tokens: token budget of a step, prefill chunks and decodes together.
    max_model_len: tokens of a request, prompt and generated ones together.
    long_prefill_token_threshold: most tokens of one request in a step, so that a long prompt leaves budget
        for others; 0 for no such bound.
    watermark: blocks that an admission leaves free for each running row; 0.5 leaves one for two rows. Rows
        take a block every block_size steps: without a reserve the admitted row is soon preempted for them,
        and its prefill was in vain.
    stages: pipeline stages, each of which runs another step at the same time. With more than one, no step
        runs a row whose newest token is in flight, and decoding rows are spread evenly over that many steps.
    max_tokens_with_drafts: most tokens of a step with drafts, these included; see `drafts_per_row`. None for
        no bound but the budget.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int = 0
    watermark: float = 0.5
    stages: int = 1
    max_tokens_with_drafts: int | None = None

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {self.max_num_seqs}: at least 1 row is needed")
        if self.max_num_batched_tokens < 1:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}: a step runs at least 1 token"
            )
        if self.max_model_len < 2:
            raise ValueError(
                f"max_model_len is {self.max_model_len}: a prompt and its continuation are at least 2 tokens"
            )
        if self.long_prefill_token_threshold < 0:
            raise ValueError(
                f"long_prefill_token_threshold is {self.long_prefill_token_threshold}: 0 turns it off, "
                "a positive number bounds the chunks"
            )
        if self.watermark < 0:
            raise ValueError(
                f"watermark is {self.watermark}: an admission leaves 0 or more blocks a row free"
            )
        if self.stages < 1:
            raise ValueError(f"stages is {self.stages}: a pipeline has at least 1")
        if self.max_tokens_with_drafts is not None and self.max_tokens_with_drafts < 0:
            raise ValueError(
                f"max_tokens_with_drafts is {self.max_tokens_with_drafts}: 0 is for steps without drafts"
            )

    @property
    def chunk(self) -> int:
        """Most tokens of one request in a step, by either bound."""
        if self.long_prefill_token_threshold:
            return min(self.long_prefill_token_threshold, self.max_num_batched_tokens)
        return self.max_num_batched_tokens

    def drafts_per_row(self, num_tokens: int, num_drafting: int) -> int:
        """Most drafts of each of `num_drafting` rows that have some, in a step of `num_tokens` besides.

        They share what `num_tokens` leaves of `max_tokens_with_drafts` and of the budget evenly: no row waits
        for the drafts of another.
        """
        most = self.max_num_batched_tokens
        if self.max_tokens_with_drafts is not None:
            most = min(most, self.max_tokens_with_drafts)
        return max(most - num_tokens, 0) // max(num_drafting, 1)


def _no_tokens() -> NDArray[np.int32]:
    return np.empty(0, np.int32)


Tokens = Sequence[int] | NDArray[np.integer]
"""Token ids as callers may give them."""


@dataclass(slots=True, eq=False)
class Request:
    """A prompt to continue.

    handle: the caller's number for it (int64); free to be used again once the request has ended.
    prompt: token ids, n >= 1 of them; kept, not copied, when it is an int32 [n] already, which it becomes.
    max_tokens: most tokens to generate. The context's end may come first.
    stop_ids: ids that end the request; the one that does is returned and counted.
    min_tokens: a stop id among the first `min_tokens - 1` generated tokens does not end the request.
    priority: lower goes first, under a policy that looks at it.
    extra: tagged bytes that keep apart, in the prefix cache, requests that must not share blocks.
    arrival: time it came, in seconds of the scheduler's clock; None for when it is added.
    use_cache: whether it may start from cached prefix blocks. If not, every position is computed.
    held: whether it is skipped until `Scheduler.release`; it keeps its place and blocks nobody.
    max_drafts: most draft tokens a step may verify for it. With any, no step is planned for it before the
        tokens of the last one are known.
    generated: token ids generated before, by another scheduler, fewer than `max_tokens`. The request resumes
        after them; `max_tokens`, `min_tokens` and `Committed.num_generated` count from the prompt's end.

    Raises RequestRefused.
    """

    handle: int
    prompt: NDArray[np.int32]
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    priority: int = 0
    extra: Sequence[tuple[str, bytes]] = ()
    arrival: float | None = None
    use_cache: bool = True
    held: bool = False
    max_drafts: int = 0
    generated: NDArray[np.int32] = field(default_factory=_no_tokens)

    if TYPE_CHECKING:
        # Takes more than its attributes hold in the end.
        def __init__(
            self,
            handle: int,
            prompt: Tokens,
            max_tokens: int,
            stop_ids: Iterable[int] = (),
            min_tokens: int = 0,
            priority: int = 0,
            extra: Sequence[tuple[str, bytes]] = (),
            arrival: float | None = None,
            use_cache: bool = True,
            held: bool = False,
            max_drafts: int = 0,
            generated: Tokens = (),
        ) -> None: ...

    def __post_init__(self) -> None:
        self.prompt = _as_tokens("the prompt", self.prompt)
        if self.prompt.size == 0:
            raise RequestRefused("the prompt is empty: at least one token is needed to continue from")
        self.generated = _as_tokens("generated", self.generated)
        self.stop_ids = _as_stop_ids(self.stop_ids)
        if not -(2**63) <= self.handle < 2**63:
            raise RequestRefused(f"handle {self.handle} does not fit 64 bits")
        if self.max_tokens < 1:
            raise RequestRefused(f"max_tokens is {self.max_tokens}: at least 1 token is generated")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise RequestRefused(
                f"min_tokens is {self.min_tokens}: it lies between 0 and max_tokens, here {self.max_tokens}"
            )
        if self.max_drafts < 0:
            raise RequestRefused(f"max_drafts is {self.max_drafts}: 0 is for none")
        if self.generated.size >= self.max_tokens:
            raise RequestRefused(
                f"generated has {self.generated.size} tokens and max_tokens is {self.max_tokens}: "
                "fewer leave a token to generate"
            )

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Prompt and generated tokens, int32 [n]."""
        return np.concatenate((self.prompt, self.generated)) if self.generated.size else self.prompt


def _as_tokens(name: str, tokens: ArrayLike) -> NDArray[np.int32]:
    ids = np.asarray(tokens)
    if ids.ndim != 1:
        raise RequestRefused(f"{name} has shape {list(ids.shape)}: one row of token ids is meant")
    if ids.size == 0:
        return _no_tokens()
    if ids.dtype.kind not in "iu":
        raise RequestRefused(f"{name} is of {ids.dtype}: integer token ids are meant")
    if ids.min() < 0 or ids.max() > MAX_ID:
        raise RequestRefused(
            f"{name} has ids from {ids.min()} to {ids.max()}: token ids lie between 0 and {MAX_ID}"
        )
    return np.ascontiguousarray(ids, np.int32)


def _as_stop_ids(stop_ids: Iterable[int]) -> tuple[int, ...]:
    ids = tuple(int(token) for token in stop_ids)
    if ids and (min(ids) < 0 or max(ids) > MAX_ID):
        raise RequestRefused(f"stop ids lie between 0 and {MAX_ID}, not {min(ids)} to {max(ids)}")
    return ids


class AdmittedRow(NamedTuple):
    """A request that holds a row from this step on."""

    row: int
    handle: int
    tokens: NDArray[np.int32]
    """All tokens so far, int32 [n]: the prompt, and what was generated before a preemption."""
    num_prompt: int
    num_cached: int
    """Leading tokens whose keys and values the row holds already; its first step starts there."""
    resumed: bool
    """Whether it comes back from preemption."""
    waited: float
    """Seconds in the queue, since it arrived or was preempted."""


class StepPlan(NamedTuple):
    """The work of one step; arrays of one element a row, rows distinct.

    A plan without rows is no step: it has no number, carries no changes, and is not to be committed.
    """

    step: int
    """1, 2, …: results are committed in this order. 0 for a plan without rows."""
    rows: NDArray[np.int32]
    starts: NDArray[np.int32]
    """Position of the first token to run, which may be sampled by a step that is still in flight."""
    counts: NDArray[np.int32]
    """Tokens to run, at least 1, drafts included."""
    samples: NDArray[np.bool_]
    """Whether they reach the row's newest, so that a token is sampled: one there, and one at each draft."""
    admitted: list[AdmittedRow]
    """Rows that begin with this step."""
    freed: NDArray[np.int32]
    """Rows that ended or were preempted since the last step; to be cleared before `admitted` is applied."""
    num_drafts: NDArray[np.int32]
    """Number of tokens, the last ones of `counts`, that are drafts."""
    drafts: NDArray[np.int32]
    """The drafts themselves, int32 [sum of num_drafts], row after row."""

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    @classmethod
    def empty(cls) -> "StepPlan":
        none = _no_tokens()
        return cls(0, none, none, none, np.empty(0, np.bool_), [], none, none, none)


class StepResult(NamedTuple):
    """The tokens that a step sampled."""

    step: int
    tokens: NDArray[np.int32]
    """Sampled ids, int32, of the plan's k sampling rows in the plan's order."""
    counts: NDArray[np.int32] | None = None
    """Tokens of each of those rows, int32 [k]: 1, and 1 more for each draft that was accepted.

    They are the accepted drafts and the token sampled after them. None for one each.
    """


class Finish(IntEnum):
    """Whether and why a token is its request's last."""

    NO = 0
    STOP = 1
    LENGTH = 2


class Committed(NamedTuple):
    """New tokens of a committed step; arrays of one element a token. Ended requests are left out.

    A request has several where drafts were accepted; they come one after the other, none after its last.
    """

    handles: NDArray[np.int64]
    tokens: NDArray[np.int32]
    finished: NDArray[np.int8]
    """A `Finish` each."""
    index: NDArray[np.int32]
    """Index of the token in `StepResult.tokens`."""
    num_generated: NDArray[np.int32]
    """Tokens generated for the request so far, this one included."""
    num_cached: NDArray[np.int32]
    """Prompt tokens that the prefix cache saved the request when it first ran."""
    rows: NDArray[np.int32]
    """The request's row in the step. No other request gets it before the next plan."""


class Load(NamedTuple):
    """Queue lengths and memory use of a scheduler."""

    running: int
    """Requests that have a row."""
    waiting: int
    """Requests in the queue, those preempted and those on hold among them."""
    waiting_tokens: int
    """Tokens those have so far: to be computed before they all decode, prefix hits aside."""
    kv_usage: float
    """Share of the blocks that rows hold, 0 to 1."""
    preemptions: int
    """Number of preemptions so far."""
    held: int
    """Waiting requests that are on hold."""


class StepBatch(NamedTuple):
    """Rows of a step, the position each starts from, and the tokens each runs; intp, int32, int32 [n]."""

    rows: NDArray[np.intp]
    starts: NDArray[np.int32]
    counts: NDArray[np.int32]

    @property
    def ends(self) -> NDArray[np.int32]:
        return self.starts + self.counts

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    @classmethod
    def empty(cls) -> "StepBatch":
        return cls(np.empty(0, np.intp), _no_tokens(), _no_tokens())

    def only(self, keep: NDArray[np.bool_]) -> "StepBatch":
        return StepBatch(self.rows[keep], self.starts[keep], self.counts[keep])

    def within(self, budget: int) -> "StepBatch":
        """Cut the batch to `budget` tokens, first rows first; the last row kept may get a part."""
        if self.num_tokens <= budget:
            return self
        left = budget - (np.cumsum(self.counts) - self.counts)
        counts = np.clip(left, 0, self.counts).astype(np.int32)
        return self._replace(counts=counts).only(counts > 0)

    def up_to(self, ends: NDArray[np.int32]) -> "StepBatch":
        """Cut each row to end at `ends` (int32 [n], beyond its start) at most."""
        return self._replace(counts=np.minimum(self.counts, ends - self.starts))

    def num_fitting(self, memory: Memory, blocks: int) -> int:
        """Return how many of the rows, from the first on, can grow with that many blocks."""
        ends = self.ends
        if memory.needed(self.rows, ends) <= blocks:
            return self.rows.size
        return bisect_right(
            range(1, self.rows.size + 1),
            blocks,
            key=lambda size: memory.needed(self.rows[:size], ends[:size]),
        )

    def joined(self, other: "StepBatch") -> "StepBatch":
        """Return the rows of both."""
        if other.rows.size == 0:
            return self
        return StepBatch(*(np.concatenate(columns) for columns in zip(self, other)))
