"""What a caller asks for."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchsched.errors import RequestRefused

MAX_ID = 2**31 - 1


@dataclass(slots=True, eq=False)
class Request:
    """A prompt to continue.

    handle: the caller's number for it (int64); free to be used again once the request has ended.
    tokens: the prompt's ids, int32 [n] with n >= 1; kept, not copied, when it is such an array already.
    max_tokens: how many tokens to generate at most. The context's end may come first.
    stop_ids: ids that end the request; the one that does is emitted and counted.
    min_tokens: a stop id among fewer tokens than this does not end the request.
    priority: lower goes first, under a policy that looks at it.
    extra: tagged bytes that keep apart, in the prefix cache, requests that must not share blocks.
    arrival: when it came, in seconds of the scheduler's clock; None for when it is added.
    use_cache: whether its prompt may be found in the prefix cache. Off, every position is computed.
    held: whether it is passed over until `Scheduler.release`; it keeps its turn, and blocks nobody's.
    max_drafts: how many draft tokens a step may verify for it at most. With any, no step is planned for it
        before the tokens of the last are known.

    Raises RequestRefused.
    """

    handle: int
    tokens: NDArray[np.int32]
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    priority: int = 0
    extra: Sequence[tuple[str, bytes]] = ()
    arrival: float | None = None
    use_cache: bool = True
    held: bool = False
    max_drafts: int = 0

    def __post_init__(self) -> None:
        self.tokens = _as_tokens(self.tokens)
        self.stop_ids = _as_ids(self.stop_ids)
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


def _as_tokens(tokens: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
    ids = np.asarray(tokens)
    if ids.ndim != 1:
        raise RequestRefused(f"the prompt's tokens have shape {list(ids.shape)}: one row of ids is meant")
    if ids.size == 0:
        raise RequestRefused("the prompt is empty: at least one token is needed to continue from")
    if ids.dtype.kind not in "iu":
        raise RequestRefused(f"the prompt's tokens are {ids.dtype}: integer ids are meant")
    if ids.min() < 0 or ids.max() > MAX_ID:
        raise RequestRefused(f"token ids lie between 0 and {MAX_ID}, not {ids.min()} to {ids.max()}")
    return np.ascontiguousarray(ids, np.int32)


def _as_ids(stop_ids: Iterable[int]) -> tuple[int, ...]:
    ids = tuple(int(token) for token in stop_ids)
    if ids and (min(ids) < 0 or max(ids) > MAX_ID):
        raise RequestRefused(f"stop ids lie between 0 and {MAX_ID}, not {min(ids)} to {max(ids)}")
    return ids
