"""The loop's body: requests in, steps planned and run, tokens out. Knows no sockets and no text."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from batchsched import (
    Committed,
    Fcfs,
    Limits,
    Policy,
    Priority,
    Recompute,
    Request,
    RequestRefused,
    Scheduler,
    ShortestFirst,
    StepPlan,
    StepResult,
    Swap,
    TimeSlice,
)
from enginecore.config import EngineConfig
from enginecore.executor.executor import Executor
from enginecore.executor.step import (
    BlockCopies,
    PositionLogprobs,
    RowStart,
    SampledTokens,
    StepInput,
    StepOutput,
)
from enginecore.messages import AddRequest, EngineStats, Outputs, Ready, TokenLogprobs, tokens_from_bytes
from kvblocks import PagedMemory

_NUMBER_BITS = 40
"""A request's handle is its client above this bit and the client's own number below it."""


class _Live:
    """A request between its arrival and its end."""

    __slots__ = ("message", "prompt_logprobs_done", "waited")

    def __init__(self, message: AddRequest) -> None:
        self.message = message
        self.prompt_logprobs_done = 0
        self.waited = 0.0


class _Counters:
    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.step_tokens = 0


class _Emitted(NamedTuple):
    """A step's results on their way to the clients."""

    committed: Committed
    logprobs: list[tuple[int, PositionLogprobs]]
    """By handle."""
    prompt_logprobs: list[tuple[int, PositionLogprobs]]
    scheduled: dict[int, tuple[int, float]]
    """By handle: cached prompt tokens and seconds in the queue, for requests that emit their first token."""


class EngineCore:
    """Schedules the requests of any number of clients over one executor.

    Clients are small integers; each names its requests by numbers of its own below 2**40.
    """

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self._executor = executor
        self._memory = PagedMemory(
            num_blocks=executor.num_blocks,
            block_size=config.block_size,
            max_rows=config.max_num_seqs,
            max_blocks_per_row=-(-executor.max_model_len // config.block_size),
            prefix_caching=config.enable_prefix_caching,
            host_blocks=executor.host_blocks,
            windows=(executor.window,),
        )
        limits = Limits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=executor.max_model_len,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            stages=config.pipeline_parallel_size,
        )
        preemption = Swap() if config.preemption_mode == "swap" else Recompute()
        self._scheduler = Scheduler(limits, self._memory, _policy(config), preemption)
        self._in_flight: deque[StepPlan] = deque()
        self._sampled: list[tuple[StepPlan, np.ndarray]] = []
        """What was sampled since the last step was submitted, where the first stage does not know it."""
        self._live: dict[int, _Live] = {}
        self._handle_of_row = np.zeros(config.max_num_seqs, np.int64)
        self._refused: dict[int, dict[int, str]] = {}
        self._counters = _Counters()
        self._clients: set[int] = set()
        self._stats_due = False
        self.ready = Ready(
            executor.max_model_len, executor.vocab_size, executor.num_blocks, config.block_size
        )

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to say."""
        return bool(self._in_flight or self._refused or self._stats_due) or self._scheduler.has_unfinished

    def add(self, client: int, message: AddRequest) -> None:
        """Take a request; one that can never run is answered with an error by the next `step`."""
        self._clients.add(client)
        handle = client << _NUMBER_BITS | message.number
        params = message.params
        try:
            self._scheduler.add(
                Request(
                    handle=handle,
                    tokens=tokens_from_bytes(message.prompt),
                    max_tokens=message.max_tokens,
                    stop_ids=tuple(message.stop_ids),
                    min_tokens=params.min_tokens,
                    priority=message.priority,
                    extra=() if message.cache_salt is None else (("salt", message.cache_salt.encode()),),
                    use_cache=params.prompt_logprobs is None,
                )
            )
        except RequestRefused as error:
            self._refused.setdefault(client, {})[message.number] = str(error)
        else:
            self._live[handle] = _Live(message)

    def abort(self, client: int, numbers: list[int]) -> None:
        """Forget requests; numbers that have ended already are passed over."""
        for number in numbers:
            handle = client << _NUMBER_BITS | number
            if self._live.pop(handle, None) is not None:
                self._scheduler.abort(handle)
                self._stats_due = True

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes that no request holds."""
        self._memory.reset()

    def step(self) -> dict[int, Outputs]:
        """Plan and start what fits, wait for the oldest step, and return each client's outputs."""
        self._start_steps()
        if not self._in_flight:
            return self._deliver(None)
        plan = self._in_flight.popleft()
        result = self._executor.collect()
        committed = self._scheduler.commit(StepResult(plan.step, result.tokens))
        emitted = self._emitted(plan, result, committed)
        if self._scheduler.limits.stages > 1:
            self._sampled.append((plan, result.tokens))
            # Now, as the first stage has nothing to do while the outputs are delivered.
            self._start_steps()
        return self._deliver(emitted)

    def _start_steps(self) -> None:
        while len(self._in_flight) < self._executor.depth:
            plan = self._scheduler.plan()
            if not len(plan.rows):
                break
            self._executor.submit(self._step_input(plan))
            self._in_flight.append(plan)

    def check(self) -> None:
        """Walk the memory's invariants; raises when a block is lost or owned twice."""
        self._memory.check()

    def stats(self) -> EngineStats:
        """Return the state after the last step."""
        load = self._scheduler.load()
        return EngineStats(
            running=load.running,
            waiting=load.waiting,
            kv_cache_usage=load.kv_usage,
            preemptions=load.preemptions,
            prefix_queries=self._memory.stats.queries,
            prefix_hits=self._memory.stats.hits,
            prompt_tokens=self._counters.prompt_tokens,
            generation_tokens=self._counters.generation_tokens,
            step_tokens=self._counters.step_tokens,
        )

    def expert_loads(self) -> np.ndarray | None:
        """Return how many tokens went to each expert; see `Executor.expert_loads`."""
        return self._executor.expert_loads()

    @property
    def descriptors(self) -> Sequence[int]:
        """File descriptors of which one becomes readable when a worker ends; see `check_workers`."""
        return self._executor.descriptors

    def check_workers(self) -> None:
        """Raise if the workers cannot go on; for a time in which there is nothing to step."""
        self._executor.check()

    def shutdown(self) -> None:
        """Give up the executor's devices."""
        self._executor.shutdown()

    def _step_input(self, plan: StepPlan) -> StepInput:
        started = []
        for opened in plan.opened:
            live = self._live[opened.handle]
            message = live.message
            self._handle_of_row[opened.row] = opened.handle
            if not opened.resumed:
                live.waited = opened.waited
                self._counters.prompt_tokens += opened.num_prompt
            started.append(
                RowStart(
                    row=opened.row,
                    tokens=opened.tokens,
                    num_prompt=opened.num_prompt,
                    params=message.params,
                    stop_ids=tuple(message.stop_ids),
                    bad_words=tuple(tuple(word) for word in message.bad_words),
                    seed=message.seed,
                    prompt_logprobs_from=live.prompt_logprobs_done,
                )
            )
        changes = self._memory.drain_changes()
        copies = self._memory.drain_copies()
        return StepInput(
            step=plan.step,
            rows=plan.rows,
            starts=plan.starts,
            counts=plan.counts,
            samples=plan.samples,
            closed=plan.closed,
            started=started,
            block_rows=changes.rows,
            block_indices=changes.indices,
            block_ids=changes.blocks,
            copies=BlockCopies(*copies.out, *copies.in_, *copies.copy) if copies.num_blocks else None,
            sampled=self._drain_sampled(),
        )

    def _drain_sampled(self) -> SampledTokens | None:
        sampled, self._sampled = self._sampled, []
        if not sampled:
            return None
        columns = [
            (plan.rows[plan.samples], (plan.starts + plan.counts)[plan.samples], ids) for plan, ids in sampled
        ]
        return SampledTokens(*(np.concatenate(parts) for parts in zip(*columns, strict=True)))

    def _emitted(self, plan: StepPlan, result: StepOutput, committed: Committed) -> _Emitted:
        counters = self._counters
        counters.step_tokens = plan.num_tokens
        counters.generation_tokens += len(committed.tokens)
        scheduled = {}
        for i in np.flatnonzero(committed.num_generated == 1).tolist():
            handle = int(committed.handles[i])
            scheduled[handle] = (int(committed.num_cached[i]), self._live[handle].waited)
        logprobs = []
        if result.logprobs:
            for handle, index in zip(committed.handles.tolist(), committed.index.tolist(), strict=True):
                if index in result.logprobs:
                    logprobs.append((handle, result.logprobs[index]))
        prompt_logprobs = []
        for entry in result.prompt_logprobs:
            handle = int(self._handle_of_row[entry.row])
            live = self._live.get(handle)
            if live is not None:
                live.prompt_logprobs_done += len(entry.ranks)
                prompt_logprobs.append((handle, entry))
        for handle in committed.handles[committed.finished > 0].tolist():
            del self._live[handle]
        return _Emitted(committed, logprobs, prompt_logprobs, scheduled)

    def _deliver(self, emitted: _Emitted | None) -> dict[int, Outputs]:
        stats = self.stats()
        self._stats_due = False
        refused, self._refused = self._refused, {}
        found = {}
        for client in self._clients:
            outputs = _outputs_for(client, emitted) if emitted is not None else _no_outputs()
            outputs.errors = refused.get(client, {})
            outputs.stats = stats
            found[client] = outputs
        return found


def _policy(config: EngineConfig) -> Policy:
    match config.scheduling_policy:
        case "priority":
            return Priority()
        case "time_slice":
            return TimeSlice(config.time_slice_tokens)
        case "shortest_first":
            return ShortestFirst()
    return Fcfs()


def _pack(number: int, entry: PositionLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        number=number,
        width=entry.ids.shape[1],
        ids=entry.ids.tobytes(),
        values=entry.values.astype(np.float32, copy=False).tobytes(),
        ranks=entry.ranks.tobytes(),
    )


def _no_outputs() -> Outputs:
    return Outputs(numbers=b"", tokens=b"", finished=b"")


def _outputs_for(client: int, emitted: _Emitted) -> Outputs:
    committed = emitted.committed
    mask = (1 << _NUMBER_BITS) - 1
    mine = committed.handles >> _NUMBER_BITS == client
    return Outputs(
        numbers=(committed.handles[mine] & mask).tobytes(),
        tokens=committed.tokens[mine].tobytes(),
        finished=committed.finished[mine].tobytes(),
        scheduled={h & mask: facts for h, facts in emitted.scheduled.items() if h >> _NUMBER_BITS == client},
        logprobs=_for_client(emitted.logprobs, client),
        prompt_logprobs=_for_client(emitted.prompt_logprobs, client),
    )


def _for_client(entries: list[tuple[int, PositionLogprobs]], client: int) -> list[TokenLogprobs]:
    mask = (1 << _NUMBER_BITS) - 1
    return [_pack(handle & mask, entry) for handle, entry in entries if handle >> _NUMBER_BITS == client]
