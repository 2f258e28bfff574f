"""Proposers of draft tokens, which a step verifies along with the tokens it decodes."""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from batchsched import Committed, Finish, Scheduler


class Drafts(NamedTuple):
    """Drafts of n rows, k each: guesses of what follows their last known token."""

    rows: NDArray[np.intp]
    """[n]: distinct."""
    tokens: NDArray[np.int32]
    """[n, k]."""


class Proposer(Protocol):
    """Guesses the next tokens of rows. Whatever it proposes, requests get the tokens they get without it."""

    def begin(self, row: int) -> None:
        """Forget a row, which another request has been given, or the same one after a preemption."""
        ...

    def propose(
        self, rows: NDArray[np.intp], tokens: NDArray[np.int32], num_tokens: NDArray[np.int32]
    ) -> Drafts:
        """Return drafts of some of `rows`, int [n], which have got tokens since the last call.

        `tokens` int32 [max_num_seqs, max_model_len] and `num_tokens` int32 [max_num_seqs] are those of all
        rows, of which `tokens[row, : num_tokens[row]]` are known.
        """
        ...


def draft(proposer: Proposer, committed: Committed, scheduler: Scheduler) -> None:
    """Give the rows that got tokens and go on drafts for their next step."""
    last = np.flatnonzero(np.append(committed.rows[1:] != committed.rows[:-1], True)[: committed.rows.size])
    going_on = last[committed.finished[last] == Finish.NO]
    if going_on.size:
        rows = committed.rows[going_on].astype(np.intp)
        drafts = proposer.propose(rows, scheduler.tokens, scheduler.num_tokens)
        scheduler.draft(drafts.rows, drafts.tokens)
