"""Counters of what a core has run."""

from bisect import bisect_left

import numpy as np

from batchsched import Load
from enginecore.core.step_results import StepResults
from enginecore.messages import STEP_BOUNDS, EngineStats
from kvblocks import PagedMemory


class Counters:
    """Counts tokens, steps and drafts from the core's start; see `EngineStats`."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self._generation_tokens = 0
        self._ran_tokens = 0
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._step_buckets = [0] * (len(STEP_BOUNDS) + 1)

    def count(self, num_tokens: int, results: StepResults) -> None:
        """Count a step that has run `num_tokens`."""
        self._ran_tokens += num_tokens
        self._step_buckets[bisect_left(STEP_BOUNDS, num_tokens)] += 1
        committed, pooled = results.committed, results.pooled
        self._generation_tokens += len(committed.tokens)
        if pooled is not None:
            # Their last parts come with tokens that nobody has generated.
            self._generation_tokens -= int(np.isin(committed.handles, pooled.rows).sum())
        self._num_drafts += len(results.drafted)
        for given, accepted in results.drafted.values():
            self._num_draft_tokens += given
            self._num_accepted_tokens += accepted

    def stats(self, load: Load, memory: PagedMemory) -> EngineStats:
        """Return the counters, with the scheduler's load and the memory's state."""
        return EngineStats(
            running=load.running,
            waiting=load.waiting,
            free_blocks=memory.num_free,
            num_blocks=memory.num_blocks,
            preemptions=load.preemptions,
            prefix_queries=memory.stats.queries,
            prefix_hits=memory.stats.hits,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self._generation_tokens,
            ran_tokens=self._ran_tokens,
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            step_buckets=self._step_buckets.copy(),
        )
