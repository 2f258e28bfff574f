"""Results of a step for the requests that it ran, and each client's share of them."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchsched import Committed, StepPlan
from enginecore.core.identity import NUMBER_BITS, NUMBER_MASK
from enginecore.core.request_table import RequestTable
from enginecore.executor.step import StepOutput
from enginecore.messages import Outputs, PooledRows, PositionLogprobs

Logprobs = list[tuple[int, PositionLogprobs]]
"""By handle."""


class StepResults(NamedTuple):
    """One step's results for all clients, by handle."""

    committed: Committed
    scheduled: dict[int, tuple[int, float]]
    """Cached prompt tokens and seconds in the queue, of requests that first ran in this step."""
    logprobs: Logprobs
    prompt_logprobs: Logprobs
    pooled: PooledRows | None
    drafted: dict[int, tuple[int, int]]
    """Drafts that the step ran, and those of them that were accepted."""

    @classmethod
    def of(
        cls, plan: StepPlan, output: StepOutput, committed: Committed, requests: RequestTable
    ) -> "StepResults":
        """Join a plan, its output and the tokens that the scheduler committed of it.

        `requests` has those that the tokens finish.
        """
        return cls(
            committed,
            scheduled={
                admitted.handle: (admitted.num_cached, admitted.waited)
                for admitted in plan.admitted
                if requests.runs_first(admitted)
            },
            logprobs=_logprobs_by_handle(output, committed) if output.logprobs else [],
            prompt_logprobs=_prompt_logprobs_by_handle(output, requests) if output.prompt_logprobs else [],
            pooled=None if output.pooled is None else _pooled_by_handle(output.pooled, requests),
            drafted={}
            if output.counts is None
            else _drafts_by_handle(plan, output.counts, committed, requests),
        )

    def outputs(self) -> dict[int, Outputs]:
        """Return the outputs of each client that some of the results are for."""
        return {client: self._outputs_for(client) for client in self._clients()}

    def _clients(self) -> set[int]:
        clients = set(np.unique(self.committed.handles >> NUMBER_BITS).tolist())
        clients.update(handle >> NUMBER_BITS for handle in self.scheduled)
        clients.update(handle >> NUMBER_BITS for handle, _ in self.prompt_logprobs)
        if self.pooled is not None:
            clients.update((self.pooled.rows >> NUMBER_BITS).tolist())
        return clients

    def _outputs_for(self, client: int) -> Outputs:
        committed = self.committed
        mine = committed.handles >> NUMBER_BITS == client
        return Outputs(
            numbers=committed.handles[mine] & NUMBER_MASK,
            tokens=committed.tokens[mine],
            finished=committed.finished[mine],
            scheduled={
                handle & NUMBER_MASK: facts
                for handle, facts in self.scheduled.items()
                if handle >> NUMBER_BITS == client
            },
            logprobs=_logprobs_for(client, self.logprobs) if self.logprobs else [],
            prompt_logprobs=_logprobs_for(client, self.prompt_logprobs) if self.prompt_logprobs else [],
            pooled=None if self.pooled is None else _pooled_for(client, self.pooled),
            drafted={
                handle & NUMBER_MASK: counts
                for handle, counts in self.drafted.items()
                if handle >> NUMBER_BITS == client
            },
        )


def _logprobs_by_handle(output: StepOutput, committed: Committed) -> Logprobs:
    pairs = zip(committed.handles.tolist(), committed.index.tolist(), strict=True)
    return [(handle, output.logprobs[index]) for handle, index in pairs if index in output.logprobs]


def _prompt_logprobs_by_handle(output: StepOutput, requests: RequestTable) -> Logprobs:
    by_handle = ((int(requests.handle_of_row[row]), entry) for row, entry in output.prompt_logprobs.items())
    return [(handle, entry) for handle, entry in by_handle if handle in requests]


def _pooled_by_handle(pooled: PooledRows, requests: RequestTable) -> PooledRows:
    """Return parts of vectors by handle, without those of requests that have been aborted."""
    handles = requests.handle_of_row[pooled.rows]
    return pooled._replace(rows=handles).only(requests.unfinished(handles))


def _drafts_by_handle(
    plan: StepPlan, counts: NDArray[np.int32], committed: Committed, requests: RequestTable
) -> dict[int, tuple[int, int]]:
    """Return how many drafts of each request a step ran, and how many of them became its tokens.

    `counts` int32 [k]: tokens of each sampling row.
    """
    given = plan.num_drafts[plan.samples]
    # Drafts behind a request's end are no tokens of it.
    owners = np.repeat(np.arange(given.size), counts)[committed.index]
    accepted = np.minimum(np.bincount(owners, minlength=given.size), counts - 1)
    drafted = np.flatnonzero(given)
    handles = requests.handle_of_row[plan.rows[plan.samples][drafted]].tolist()
    return dict(zip(handles, zip(given[drafted].tolist(), accepted[drafted].tolist()), strict=True))


def _logprobs_for(client: int, entries: Logprobs) -> Logprobs:
    return [(handle & NUMBER_MASK, entry) for handle, entry in entries if handle >> NUMBER_BITS == client]


def _pooled_for(client: int, pooled: PooledRows) -> PooledRows | None:
    mine = pooled.only(pooled.rows >> NUMBER_BITS == client)
    return mine._replace(rows=mine.rows & NUMBER_MASK) if len(mine.rows) else None
