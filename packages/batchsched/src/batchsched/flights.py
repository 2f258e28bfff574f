"""Steps that were planned and whose results are not known yet."""

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchsched.batch import Batch
from batchsched.errors import StepMismatch
from batchsched.messages import StepResult


class Flight(NamedTuple):
    """A step in flight: its rows (intp [n]), where each ends (int32 [n]), and who samples (intp [k])."""

    step: int
    rows: NDArray[np.intp]
    ends: NDArray[np.int32]
    sampling: NDArray[np.intp]


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

    def launch(self, batch: Batch, samples: NDArray[np.bool_]) -> None:
        self.newest += 1
        self._flights.append(Flight(self.newest, batch.rows, batch.ends, batch.rows[samples]))

    def land(self, result: StepResult) -> tuple[Flight, NDArray[np.int32]]:
        """The oldest flight and what it sampled, int32 [k]. Raises StepMismatch if this is not its result."""
        if not self._flights:
            raise StepMismatch(f"step {result.step} has a result, and no step is in flight")
        flight = self._flights[0]
        if result.step != flight.step:
            raise StepMismatch(f"step {result.step} has a result, and step {flight.step} comes first")
        tokens = np.asarray(result.tokens, np.int32)
        if tokens.shape != flight.sampling.shape:
            raise StepMismatch(
                f"step {flight.step} samples {flight.sampling.size} tokens, and its result has {tokens.shape}"
            )
        self.landed = flight.step
        return self._flights.popleft(), tokens
