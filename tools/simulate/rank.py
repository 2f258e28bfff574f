"""One data-parallel rank: a scheduler, its memory, and a device that runs one step at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from batchsched import Committed, Limits, Policy, Preemption, Request, Scheduler, StepPlan, StepResult
from kvblocks import PagedMemory
from simulate.device import Device
from simulate.outcome import Outcome

_LONGEST_STRETCH = 64


@dataclass(frozen=True)
class Setup:
    """Configuration of a rank; every rank of a replay is the same.

    host_blocks: blocks of the host tier; 0 for none.
    stretches: whether decoding steps between which nothing happens are run as one.
    """

    device: Device
    limits: Limits
    num_blocks: int
    block_size: int
    policy: Callable[[], Policy]
    preemption: Callable[[], Preemption]
    host_blocks: int = 0
    prefix_caching: bool = True
    stretches: bool = True


class Rank:
    """A scheduler and its memory on a device. It runs decoding steps as one, a stretch, where it can.

    A stretch lasts while no request waits, ends or arrives. It equals its steps run singly: the scheduler
    takes the tokens of the later steps for drafts, all of which are accepted, and the device takes as long as
    for the steps one after another. Only the KV blocks for all of them are allocated at once. With a host
    tier there are no stretches, since evictions in their course would add copies.
    """

    def __init__(self, setup: Setup, outcome: Outcome, clock: Callable[[], float]) -> None:
        limits = setup.limits
        self.memory = PagedMemory(
            num_blocks=setup.num_blocks,
            block_size=setup.block_size,
            max_rows=limits.max_num_seqs,
            max_blocks_per_row=-(-limits.max_model_len // setup.block_size),
            prefix_caching=setup.prefix_caching,
            host_blocks=setup.host_blocks,
        )
        self.scheduler = Scheduler(limits, self.memory, setup.policy(), setup.preemption(), clock)
        self._device = setup.device
        self._outcome = outcome
        self._has_host = setup.host_blocks > 0
        self._longest = _LONGEST_STRETCH if setup.stretches and not self._has_host else 1
        self._plan = StepPlan.empty()
        self._steps = 0
        self._committed: Committed | None = None
        # Whatever is sampled: a request ends by its length, and no prompt has a block of zeros.
        self._ids = np.zeros((limits.max_num_seqs, self._longest), np.int32)

    @property
    def idle(self) -> bool:
        """Whether no step is on the device."""
        return self._plan.step == 0

    def add(self, handle: int, tokens: np.ndarray, max_tokens: int, priority: int) -> None:
        """Queue a request that generates `max_tokens` tokens. Raises RequestRefused."""
        self.scheduler.add(
            Request(handle, tokens, max_tokens, priority=priority, max_drafts=self._longest - 1)
        )

    def cached_tokens(self, keys: Sequence[bytes]) -> int:
        """Return how many leading tokens of a prompt with these block keys are cached on the device."""
        return self.memory.pool.match(keys).size * self.memory.block_size

    def start(self, seconds_to_arrival: float) -> float | None:
        """Put the next step on the device and return its seconds; None if there is nothing to run."""
        self._draft(seconds_to_arrival)
        self._plan = plan = self.scheduler.plan()
        if self.idle:
            return None
        if plan.num_drafts.any():
            self._steps = int(plan.counts[0])
            assert (plan.counts == self._steps).all(), "a stretch runs all rows equally far"
            context = int(plan.starts.sum()) + plan.rows.size
            seconds = self._device.stretch(plan.rows.size, context, self._steps)
        else:
            self._steps = 1
            seconds = self._device.seconds(plan) + self._copy()
        usage = 1 - self.memory.num_free / self.memory.num_blocks
        self._outcome.count(self._steps, seconds, usage)
        return seconds

    def finish(self, now: float) -> None:
        """Take the step off the device, commit it and note its tokens."""
        size = np.count_nonzero(self._plan.samples)
        counts = None if self._steps == 1 else np.full(size, self._steps, np.int32)
        sampled = self._ids[:size, : self._steps].ravel()
        done = self._committed = self.scheduler.commit(StepResult(self._plan.step, sampled, counts))
        first = done.num_generated == 1
        if first.any():
            self._outcome.begin(done.handles[first], now, done.num_cached[first])
        ended = done.finished != 0
        if ended.any():
            self._outcome.end(done.handles[ended], now, done.num_generated[ended])

    def _draft(self, seconds: float) -> None:
        """Make the next step a stretch of those that end within `seconds`, if nothing can come between."""
        done = self._committed
        if self._longest == 1 or done is None:
            return
        # A stretch has one row's tokens after the other's; the last of them has the row's length.
        last = slice(self._steps - 1, None, self._steps)
        goes_on = done.finished[last] == 0
        columns = done.rows, done.handles, done.num_generated
        rows, handles, generated = (column[last][goes_on] for column in columns)
        load = self.scheduler.load()
        if load.waiting or load.running != rows.size or not rows.size:
            return
        limits = self.scheduler.limits
        left = int((self._outcome.outputs[handles] - generated).min())
        longest = min(left, self._longest, limits.max_num_batched_tokens // rows.size, limits.chunk)
        context = int((self._outcome.prompts[handles] + generated).sum())
        steps = self._device.steps_within(seconds, rows.size, context, longest)
        if steps > 1:
            self.scheduler.draft(rows, self._ids[: rows.size, : steps - 1])

    def _copy(self) -> float:
        """Seconds for the copies between device and host that are due before the step."""
        if not self._has_host:
            return 0.0
        copies = self.memory.drain_copies()
        self._outcome.copied_out += copies.swap_out.sources.size
        self._outcome.copied_in += copies.swap_in.sources.size
        return copies.num_blocks * self.memory.block_size * self._device.swap
