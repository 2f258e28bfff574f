"""The unfinished requests of a core, by handle and by row."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchsched import AdmittedRow
from enginecore.core.identity import NUMBER_BITS, NUMBER_MASK
from enginecore.messages import AddRequest, PositionLogprobs, RowSampling


class RequestTable:
    """Messages of unfinished requests by handle, and the handle of each row."""

    def __init__(self, max_rows: int) -> None:
        self._messages: dict[int, AddRequest] = {}
        self.handle_of_row = np.zeros(max_rows, np.int64)
        """[max_num_seqs]: of the request that has the row, or had it last.

        No row is given to another request while a step that runs it is in flight.
        """

    def __contains__(self, handle: object) -> bool:
        """Whether the request is unfinished."""
        return handle in self._messages

    def unfinished(self, handles: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of the requests are unfinished, [n] for handles [n]."""
        return np.array([handle in self._messages for handle in handles.tolist()], bool)

    def add(self, handle: int, message: AddRequest) -> None:
        """Take a request that the scheduler has taken."""
        self._messages[handle] = message

    def remove(self, handle: int) -> AddRequest:
        """Remove an unfinished request and return its message."""
        return self._messages.pop(handle)

    def clear(self) -> None:
        """Remove all."""
        self._messages.clear()

    def numbers(self, client: int) -> list[int]:
        """Return a client's numbers for its unfinished requests."""
        return [handle & NUMBER_MASK for handle in self._messages if handle >> NUMBER_BITS == client]

    def begin_row(self, admitted: AdmittedRow) -> RowSampling:
        """Note whose the row is from now on; return the sampling parameters for it."""
        self.handle_of_row[admitted.row] = admitted.handle
        return self._messages[admitted.handle].sampling

    def runs_first(self, admitted: AdmittedRow) -> bool:
        """Whether a request has run neither here nor, as far as its front-end knows, elsewhere."""
        message = self._messages.get(admitted.handle)
        return not admitted.resumed and (message is None or not message.counted)

    def report_prompt_logprobs(self, handle: int, entry: PositionLogprobs) -> None:
        """Have a request resume, after a preemption, behind the prompt positions of `entry`."""
        message = self._messages[handle]
        done = message.sampling.prompt_logprobs_done + len(entry.ranks)
        # Not in place: a front-end in this process keeps the message.
        sampling = msgspec.structs.replace(message.sampling, prompt_logprobs_done=done)
        self._messages[handle] = msgspec.structs.replace(message, sampling=sampling)
