"""Steps that were planned and whose results are not known yet."""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchsched.batch import Batch
from batchsched.errors import StepMismatch
from batchsched.messages import StepResult


class Flight(NamedTuple):
    """A step in flight: its rows (intp [n]), where each ends (int32 [n]), and who samples (intp [k]).

    `num_drafts` is int32 [k], None if nobody has drafts.
    """

    step: int
    rows: NDArray[np.intp]
    ends: NDArray[np.int32]
    sampling: NDArray[np.intp]
    num_drafts: NDArray[np.int32] | None


class Landed(NamedTuple):
    """A flight and what it sampled: `tokens` int32, of which each sampling row has `counts` (int32 [k]).

    `counts` is None where every row has one.
    """

    flight: Flight
    tokens: NDArray[np.int32]
    counts: NDArray[np.int32] | None


class Flights:
    """Numbers steps, and takes their results back in the same order."""

    def __init__(self) -> None:
        self._flights: deque[Flight] = deque()
        self.newest = 0
        """The last step that took off, landed or not."""
        self.landed = 0
        """The last step whose result is known; those before it are known too."""

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        """Those in flight, the oldest first."""
        return iter(self._flights)

    def launch(self, batch: Batch, samples: NDArray[np.bool_], num_drafts: NDArray[np.int32] | None) -> None:
        """Number the step. `num_drafts` is int32 [n], or None if nobody has drafts."""
        self.newest += 1
        drafts = None if num_drafts is None else num_drafts[samples]
        self._flights.append(Flight(self.newest, batch.rows, batch.ends, batch.rows[samples], drafts))

    def land(self, result: StepResult) -> Landed:
        """The oldest flight and what it sampled. Raises StepMismatch if this is not its result."""
        if not self._flights:
            raise StepMismatch(f"step {result.step} has a result, and no step is in flight")
        flight = self._flights[0]
        if result.step != flight.step:
            raise StepMismatch(f"step {result.step} has a result, and step {flight.step} comes first")
        tokens = np.asarray(result.tokens, np.int32)
        counts = _counts(flight, result)
        size = flight.sampling.size if counts is None else int(counts.sum())
        if tokens.shape != (size,):
            raise StepMismatch(
                f"step {flight.step} samples {size} tokens, and its result has {list(tokens.shape)}"
            )
        self.landed = flight.step
        return Landed(self._flights.popleft(), tokens, counts)


def _counts(flight: Flight, result: StepResult) -> NDArray[np.int32] | None:
    """How many tokens each sampling row has, or None if that is 1 and no row had drafts."""
    if result.counts is None:
        return None if flight.num_drafts is None else np.ones(flight.sampling.size, np.int32)
    counts = np.asarray(result.counts, np.int32)
    if counts.shape != flight.sampling.shape:
        raise StepMismatch(
            f"step {flight.step} has {flight.sampling.size} sampling rows, and its result counts for "
            f"{list(counts.shape)}"
        )
    most = 1 if flight.num_drafts is None else 1 + flight.num_drafts
    wrong = np.flatnonzero((counts < 1) | (counts > most))
    if wrong.size:
        raise StepMismatch(
            f"the rows {flight.sampling[wrong].tolist()} of step {flight.step} have {counts[wrong].tolist()} "
            "tokens: it is 1 each, and at most 1 more for each draft"
        )
    return None if flight.num_drafts is None else counts
