"""What goes between the scheduler, whoever runs the steps, and whoever delivers the tokens."""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class OpenedRow(NamedTuple):
    """A request that has a row from this step on."""

    row: int
    handle: int
    tokens: NDArray[np.int32]
    """All tokens so far, int32 [n]: the prompt, and after preemption what was generated since."""
    num_prompt: int
    num_cached: int
    """Leading tokens whose keys and values the row holds already; its first step starts there."""
    resumed: bool
    """Whether it comes back from preemption."""
    waited: float
    """Seconds in the queue, since it arrived or was preempted."""


class StepPlan(NamedTuple):
    """What to run in one step; arrays of one element a row, rows distinct.

    A plan without rows is no step: it has no number, carries no changes, and is not to be committed.
    """

    step: int
    """1, 2, …: results are committed in this order. 0 for a plan without rows."""
    rows: NDArray[np.int32]
    starts: NDArray[np.int32]
    """Position of the first token to run, which a step in flight may have yet to sample."""
    counts: NDArray[np.int32]
    """How many tokens to run, at least 1, drafts included."""
    samples: NDArray[np.bool_]
    """Whether they reach the row's newest, so that a token is sampled: one there, and one at each draft."""
    opened: list[OpenedRow]
    """Rows that begin with this step."""
    closed: NDArray[np.int32]
    """Rows that ended or were preempted since the last step; to be forgotten before `opened` is looked at."""
    num_drafts: NDArray[np.int32]
    """How many of the tokens, the last ones, are drafts."""
    drafts: NDArray[np.int32]
    """The drafts themselves, int32 [sum of num_drafts], one row's after the other's."""

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    @classmethod
    def nothing(cls) -> "StepPlan":
        """The plan without rows."""
        none = np.empty(0, np.int32)
        return cls(0, none, none, none, np.empty(0, np.bool_), [], none, none, none)


class StepResult(NamedTuple):
    """What a step gave."""

    step: int
    tokens: NDArray[np.int32]
    """Sampled ids, int32, of the plan's k sampling rows in the plan's order."""
    counts: NDArray[np.int32] | None = None
    """How many of them each of those rows has, int32 [k]: 1, and 1 more for each draft that was accepted.

    They are the accepted drafts and the token sampled after them. None for one each.
    """


class Finish(IntEnum):
    """Whether and why a token is its request's last."""

    NO = 0
    STOP = 1
    LENGTH = 2


class Committed(NamedTuple):
    """The tokens a step emitted; arrays of one element a token. Results of ended requests are left out.

    A request has several where drafts were accepted; they come one after the other, none behind its last.
    """

    handles: NDArray[np.int64]
    tokens: NDArray[np.int32]
    finished: NDArray[np.int8]
    """A `Finish` each."""
    index: NDArray[np.int32]
    """Where the token is in `StepResult.tokens`."""
    num_generated: NDArray[np.int32]
    """Tokens of the request so far, this one included."""
    num_cached: NDArray[np.int32]
    """Prompt tokens that the prefix cache saved the request when it first ran."""
    rows: NDArray[np.int32]
    """The request's row in the step. Until the next plan nobody else's."""


class Load(NamedTuple):
    """How busy the scheduler is."""

    running: int
    """Requests that have a row."""
    waiting: int
    """Requests in the queue, those preempted and those on hold among them."""
    waiting_tokens: int
    """Tokens those have so far: what is to be computed before they all decode, prefix hits aside."""
    kv_usage: float
    """Share of the blocks that rows hold, 0 to 1."""
    preemptions: int
    """How many times a request was preempted, ever."""
    held: int
    """Those of the waiting that are on hold."""
