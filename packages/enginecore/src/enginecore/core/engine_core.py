"""The engine core's loop: requests in, steps planned and run, tokens out. Knows no sockets and no text."""

import itertools
import logging
import time
import traceback
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchsched import (
    AdmittedRow,
    Committed,
    Finish,
    Limits,
    NeverFits,
    Policy,
    PromptTooLong,
    Recompute,
    Request,
    RequestRefused,
    Scheduler,
    StepPlan,
    StepResult,
    Swap,
)
from enginecore.config import EngineConfig
from enginecore.core.board import Board
from enginecore.core.drafts import Proposer
from enginecore.core.identity import NUMBER_BITS, NUMBER_MASK
from enginecore.core.lockstep import Lockstep
from enginecore.core.ngram import NgramProposer
from enginecore.core.policies import make_policy
from enginecore.core.step_log import PLAN, RUN, StepLog, block_map
from enginecore.data_parallel.meeting import Meeting
from enginecore.data_parallel.messages import ALONE, LoadReport, RankPlace
from enginecore.data_parallel.prefixes import all_keys, kv_events, request_salt
from enginecore.errors import ContextLengthError, EngineDeadError, NoTokenError
from enginecore.executor.executor import Executor, OnLoaded, OnPhase, make_executor
from enginecore.executor.step import NOT_FINITE, SampledTokens, StepInput, StepOutput, empty_step
from enginecore.messages import (
    STEP_BOUNDS,
    AddRequest,
    EngineStats,
    KVEvents,
    Outputs,
    PooledRows,
    PositionLogprobs,
    StepsView,
)
from enginecore.model_files import ModelFiles
from enginecore.plugins import import_all
from enginecore.sampling_params import SamplingParams
from kvblocks import PagedMemory

logger = logging.getLogger(__name__)

_NO_TOKEN = NoTokenError.START + (
    "the grammar is too ambiguous to be followed, or it and allowed_token_ids or bad_words leave none; or "
    "the model's logits are NaN or infinite"
)
_NO_LOGITS = "the model's logits are NaN or infinite: its weights are damaged, or too large for its dtype"

_Logprobs = list[tuple[int, PositionLogprobs]]
"""By handle."""


def start_core(
    config: EngineConfig,
    files: ModelFiles,
    *,
    place: RankPlace = ALONE,
    meeting: Meeting | None = None,
    board: Board | None = None,
    on_loaded: OnLoaded | None = None,
    on_phase: OnPhase = lambda phase: None,
) -> "EngineCore":
    """Import plug-ins, start the workers, and return a core once they are ready.

    `on_loaded` is told of weights as they are read, `on_phase` which part of starting begins. `board` is
    where other processes see what it does.

    Raises:
        ConfigError: a plug-in or the policy cannot be had, before anything is started; or as `make_executor`.
        ModelError, EngineDeadError: as `make_executor`.
    """
    import_all(config.plugins, config.plugin_path)
    policy = make_policy(config)
    lockstep = Lockstep(place.rank) if config.shares_experts else None
    executor = make_executor(
        config, files, place=place, meeting=meeting, on_loaded=on_loaded, on_phase=on_phase
    )
    return EngineCore(config, executor, policy, board=board, lockstep=lockstep)


class _Counters:
    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.ran_tokens = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.step_buckets = [0] * (len(STEP_BOUNDS) + 1)


class _StepUnderWay(NamedTuple):
    plan: StepPlan
    handles: NDArray[np.int64]
    """[n]: of the plan's rows."""
    started: float
    """Seconds of the monotonic clock."""


class _StepResults(NamedTuple):
    """One step's results for all clients, by handle."""

    committed: Committed
    scheduled: dict[int, tuple[int, float]]
    """Cached prompt tokens and seconds in the queue, of requests that first ran in this step."""
    logprobs: _Logprobs
    prompt_logprobs: _Logprobs
    pooled: PooledRows | None
    drafted: dict[int, tuple[int, int]]
    """Drafts that the step ran, and those of them that were accepted."""

    def clients(self) -> set[int]:
        """Return the clients that some of it is for."""
        clients = set(np.unique(self.committed.handles >> NUMBER_BITS).tolist())
        clients.update(handle >> NUMBER_BITS for handle in self.scheduled)
        clients.update(handle >> NUMBER_BITS for handle, _ in self.prompt_logprobs)
        if self.pooled is not None:
            clients.update((self.pooled.rows >> NUMBER_BITS).tolist())
        return clients


class EngineCore:
    """Schedules the requests of any number of clients over one executor.

    Clients are small integers; each names its requests by numbers of its own below 2**40.

    Whatever `step` raises ends the engine: the executor is shut down, and that and every later call raise
    EngineDeadError, whose `__cause__` leads to the first error.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        policy: Policy | None = None,
        *,
        board: Board | None = None,
        lockstep: Lockstep | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        """`board` is where other processes see each step before it starts, and its end.

        `proposer` has drafts for a `config` that speculates; by default it is prompt lookup.
        """
        self._executor = executor
        self._board = board
        self.lockstep = lockstep
        """Where the engine shares experts with others."""
        self.limits = limits = executor.limits
        self._memory = PagedMemory(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_rows=config.max_num_seqs,
            max_blocks_per_row=-(-limits.max_model_len // limits.block_size),
            prefix_caching=config.enable_prefix_caching,
            host_blocks=limits.host_blocks,
            windows=(limits.window,),
            record_events=config.follows_prefixes,
        )
        speculation = config.speculation
        self._max_drafts = 0 if speculation is None else speculation.num_speculative_tokens
        self._proposer: Proposer | None = None
        if speculation is not None:
            self._proposer = proposer or NgramProposer(speculation, config.max_num_seqs, limits.max_model_len)
        self._scheduler = Scheduler(
            Limits(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                # What is made of a prompt that is pooled takes a token's place, and the prompt may fill all
                # others; `_most_tokens` keeps what is generated within the context.
                max_model_len=limits.max_model_len + 1,
                long_prefill_token_threshold=config.long_prefill_token_threshold,
                stages=config.pipeline_parallel_size,
                max_tokens_with_drafts=config.max_tokens_with_drafts(limits.device),
            ),
            self._memory,
            policy or make_policy(config),
            Swap() if config.preemption_mode == "swap" else Recompute(),
        )
        self.error: EngineDeadError | None = None
        """Why the engine has ended; None while it runs."""
        self._in_flight: deque[_StepUnderWay] = deque()
        self._sampled: list[SampledTokens] = []
        """What was sampled since the last step was submitted, where the first stage does not know it."""
        self._unfinished: dict[int, AddRequest] = {}
        self._alone: deque[int] = deque()
        """Handles of requests that run alone until they have got a token; the first one does now."""
        self._alone_is_next = True
        """Whether the next step is to run the first of those; every other step runs the rest."""
        self._handle_of_row = np.zeros(config.max_num_seqs, np.int64)
        self._refused: dict[int, dict[int, str]] = {}
        self._counters = _Counters()
        self._steps = 0
        self._step_seconds = 0.0
        """Duration of the last step."""
        self._request_salts = itertools.count()
        self.step_log: StepLog | None = None
        """Where steps are recorded, while somebody watches."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to say."""
        runnable = self.has_unfinished if self.lockstep is None else self.lockstep.running
        return bool(self._in_flight or self._refused) or runnable

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return self._scheduler.has_unfinished

    def add(self, client: int, message: AddRequest) -> None:
        """Take a request; one that can never run is answered with an error by the next `step`.

        Raises:
            EngineDeadError: the engine has ended.
        """
        self.require_alive()
        handle = client << NUMBER_BITS | message.number
        sampling = message.sampling
        salt = self._prefix_salt(message)
        try:
            self._scheduler.add(
                Request(
                    handle=handle,
                    prompt=message.prompt,
                    generated=message.generated,
                    max_tokens=self._most_tokens(message),
                    stop_ids=tuple(sampling.stop_ids),
                    # A grammar's end beats the minimum length: the worker says where a stop id may come.
                    min_tokens=sampling.params.min_tokens if sampling.guide is None else 0,
                    priority=message.priority,
                    extra=salt,
                    arrival=time.monotonic() - message.age,
                    use_cache=_may_read_cache(sampling.params),
                    held=message.alone,
                    max_drafts=self._max_drafts,
                )
            )
        except RequestRefused as error:
            refusal: Exception = error
            if isinstance(error, PromptTooLong | NeverFits):
                refusal = ContextLengthError(self.limits.max_model_len, str(error))
            self._refused.setdefault(client, {})[message.number] = str(refusal)
        except Exception as error:  # a policy's, which ranks what is added
            self.fail(error)
        else:
            self._unfinished[handle] = message
            if message.alone:
                self._alone.append(handle)

    def _most_tokens(self, message: AddRequest) -> int:
        """Return how many tokens a request may have, within the context.

        Raises:
            PromptTooLong: its prompt leaves room for none.
        """
        if message.sampling.pooling is not None:
            return 1
        num_prompt, context = len(message.prompt), self.limits.max_model_len
        if num_prompt >= context:
            raise PromptTooLong(num_prompt, context)
        return min(message.max_tokens, context - num_prompt)

    def _prefix_salt(self, message: AddRequest) -> tuple[tuple[str, bytes], ...]:
        """Return what a request's prefix-cache keys depend on besides its tokens."""
        salt = request_salt(message.cache_salt)
        limit = self.limits.dynamic_length
        if limit is not None and len(message.prompt) > limit:
            # Its keys are rotated by its own length: only it can use them again, after a preemption.
            return (*salt, ("request", next(self._request_salts).to_bytes(8, "little")))
        return salt

    def abort(self, client: int, numbers: list[int]) -> None:
        """Forget requests; numbers that have ended already are passed over."""
        for number in numbers:
            handle = client << NUMBER_BITS | number
            if self._unfinished.pop(handle, None) is not None:
                self._scheduler.abort(handle)

    def forget(self, client: int) -> None:
        """Drop all requests of a client that has gone."""
        self._refused.pop(client, None)
        mine = [handle for handle in self._unfinished if handle >> NUMBER_BITS == client]
        self.abort(client, [handle & NUMBER_MASK for handle in mine])

    def prefix_events(self) -> KVEvents:
        """Return what has changed in the prefix cache since the last call."""
        return kv_events(self._memory.pool.events())

    def cached_prefixes(self) -> KVEvents:
        """Return all that the prefix cache holds."""
        return all_keys(self._memory.pool)

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes that no request holds."""
        self._memory.reset()

    def step(self) -> dict[int, Outputs]:
        """Plan and start what fits, wait for the oldest step, and return each client's outputs.

        Raises:
            EngineDeadError: something in the step failed, or the engine had ended before.
        """
        self.require_alive()
        try:
            return self._step()
        except BaseException as error:
            # A step that was cut short, by whatever, has changed some of the state and not the rest.
            self.fail(error)

    def _step(self) -> dict[int, Outputs]:
        self._start_steps()
        if not self._in_flight:
            return self._deliver(None)
        step = self._in_flight[0]
        result = self._executor.collect()
        plan = self._ended(step).plan
        if self.step_log is not None:
            self.step_log.spent(RUN)
            if len(plan.rows):
                self.step_log.ran(plan)
        if self.lockstep is not None and result.unfinished is not None:
            self.lockstep.answer(result.unfinished)
        if not len(plan.rows):
            return self._deliver(None)
        sampled = StepResult(plan.step, np.maximum(result.tokens, 0), result.counts)
        committed = self._scheduler.commit(sampled)
        if self._alone and self._alone[0] in committed.handles:
            self._scheduler.release(self._alone.popleft())
        committed = self._without_broken(committed, result)
        if self._proposer is not None:
            self._draft(self._proposer, committed)
        results = self._results(plan, result, committed)
        if self._scheduler.limits.stages > 1:
            self._sampled.append(_sampled_tokens(plan, result))
            # Now, as the first stage has nothing to do while the outputs are delivered.
            self._start_steps()
        return self._deliver(results)

    def _draft(self, proposer: Proposer, committed: Committed) -> None:
        """Give the rows that got tokens and go on drafts for their next step."""
        last = np.flatnonzero(
            np.append(committed.rows[1:] != committed.rows[:-1], True)[: committed.rows.size]
        )
        going_on = last[committed.finished[last] == Finish.NO]
        if going_on.size:
            rows = committed.rows[going_on].astype(np.intp)
            drafts = proposer.propose(rows, self._scheduler.tokens, self._scheduler.num_tokens)
            self._scheduler.draft(drafts.rows, drafts.tokens)

    def _ended(self, step: _StepUnderWay) -> _StepUnderWay:
        """Take the oldest step out of those under way."""
        self._in_flight.popleft()
        self._steps += 1
        self._step_seconds = time.monotonic() - step.started
        if self._board is not None:
            handles = [other.handles for other in self._in_flight]
            self._board.end_step(handles, step.plan.num_tokens, self._step_seconds)
        return step

    def _without_broken(self, committed: Committed, result: StepOutput) -> Committed:
        """End the requests that have no logits to choose from, and return the tokens of the others."""
        broken = result.tokens[committed.index] == NOT_FINITE
        if not broken.any():
            return committed
        columns = committed.handles[broken], committed.finished[broken] > 0, committed.index[broken]
        for handle, ended, index in zip(*(column.tolist() for column in columns), strict=True):
            client, number = handle >> NUMBER_BITS, handle & NUMBER_MASK
            guided = self._unfinished.pop(handle).sampling.guide is not None
            reason = result.errors.get(index, _NO_TOKEN if guided else _NO_LOGITS)
            self._refused.setdefault(client, {})[number] = reason
            if not ended:
                self._scheduler.abort(handle)
            logger.error("a request ended: %s", reason)
        return Committed(*(column[~broken] for column in committed))

    def fail(self, cause: BaseException) -> NoReturn:
        """End the engine.

        Raises:
            EngineDeadError: with `cause` as its cause; `cause` itself if it is no Exception.
        """
        self._end(cause)
        if isinstance(cause, Exception):
            self.require_alive()
        raise cause

    def _end(self, cause: BaseException) -> None:
        """Record why the engine has ended, and give up its workers."""
        told = isinstance(cause, EngineDeadError)  # by an executor, which has logged it
        reason = str(cause) if told else f"{type(cause).__name__}: {cause}"
        self.error = EngineDeadError(" ".join(f"the engine has ended: {reason}".split()))
        logger.error("%s", self.error, exc_info=None if told else cause)
        self.error.__cause__ = cause
        # Frames of the failed step hold the model and its cache.
        traceback.clear_frames(cause.__traceback__)
        self._unfinished.clear()
        self._in_flight.clear()
        self._executor.shutdown()

    def _start_steps(self) -> None:
        lockstep = self.lockstep
        while len(self._in_flight) < self._executor.depth and (lockstep is None or lockstep.may_start):
            plan = self._plan()
            if lockstep is None:
                if not len(plan.rows):
                    break
                step_input = self._step_input(plan)
            else:
                step_input = self._lockstep_input(plan, lockstep)
            step = _StepUnderWay(plan, self._handle_of_row[plan.rows], time.monotonic())
            self._in_flight.append(step)
            if self._board is not None:
                alone = bool(self._alone) and step.handles.tolist() == [self._alone[0]]
                handles = [other.handles for other in self._in_flight]
                self._board.begin_step(handles, plan.num_tokens, alone)
            if self.step_log is not None:
                self.step_log.spent(PLAN)
            self._executor.submit(step_input)
            if self.step_log is not None:
                self.step_log.spent(RUN)

    def _lockstep_input(self, plan: StepPlan, lockstep: Lockstep) -> StepInput:
        empty = not len(plan.rows)
        asks = lockstep.start(empty=empty, unfinished=self.has_unfinished)
        return empty_step(asks) if empty else self._step_input(plan)._replace(unfinished=asks)

    def _plan(self) -> StepPlan:
        """Plan a step; while requests are to run alone every other one is theirs, with none beside it."""
        while self._alone and self._alone[0] not in self._unfinished:
            self._alone.popleft()
        if not self._alone:
            return self._scheduler.plan()
        if self._in_flight:
            return StepPlan.empty()
        alone, rest = self._alone[0], None
        order = (alone, rest) if self._alone_is_next else (rest, alone)
        for only in order:
            plan = self._scheduler.plan(only)
            if len(plan.rows):
                self._alone_is_next = only is rest
                return plan
        return StepPlan.empty()

    def require_alive(self) -> None:
        """Raise EngineDeadError if the engine has ended."""
        if self.error is not None:
            # A new one each time, as what is raised keeps the frames that it went through.
            raise EngineDeadError(str(self.error)) from self.error.__cause__

    def check(self) -> None:
        """Walk the memory's invariants; raises when a block is lost or owned twice."""
        self._memory.check()

    def stats(self) -> EngineStats:
        """Return the state after the last step."""
        load = self._scheduler.load()
        counters = self._counters
        return EngineStats(
            running=load.running,
            waiting=load.waiting,
            free_blocks=self._memory.num_free,
            num_blocks=self._memory.num_blocks,
            preemptions=load.preemptions,
            prefix_queries=self._memory.stats.queries,
            prefix_hits=self._memory.stats.hits,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            ran_tokens=counters.ran_tokens,
            num_drafts=counters.num_drafts,
            num_draft_tokens=counters.num_draft_tokens,
            num_accepted_tokens=counters.num_accepted_tokens,
            step_buckets=counters.step_buckets.copy(),
        )

    def steps_view(self, *, with_blocks: bool) -> StepsView:
        """Return what `step_log` has recorded since the last call, and a map of the KV cache's blocks."""
        assert self.step_log is not None, "nobody watches"
        view = StepsView(self.step_log.drain())
        if with_blocks:
            states = self._memory.pool.states()
            view.blocks = block_map(states)
            view.totals = np.bincount(states, minlength=4).tolist()
        return view

    def load_report(self, rank: int, at: float) -> LoadReport:
        """Return the state for the coordinator; `at` is when requests were last taken in."""
        load = self._scheduler.load()
        used = self._memory.num_blocks - self._memory.num_free
        return LoadReport(
            rank=rank,
            at=at,
            waiting=load.waiting,
            running=load.running,
            free_blocks=self._memory.num_free,
            tokens=load.waiting_tokens + used * self._memory.block_size,
            step_seconds=self._step_seconds,
            steps=self._steps,
        )

    def expert_loads(self) -> np.ndarray | None:
        """Return how many tokens went to each expert; see `Executor.expert_loads`."""
        self.require_alive()
        return self._executor.expert_loads()

    @property
    def descriptors(self) -> Sequence[int]:
        """File descriptors of which one becomes readable when a worker ends; see `check_workers`."""
        return self._executor.descriptors

    @property
    def local_pids(self) -> list[int]:
        """Process ids of workers on this host that are processes of their own."""
        return self._executor.local_pids

    def check_workers(self) -> None:
        """Raise EngineDeadError if a worker has ended; for a time in which there is nothing to step."""
        self.require_alive()
        try:
            self._executor.check()
        except EngineDeadError as error:
            self.fail(error)

    def shutdown(self) -> None:
        """Give up the executor's devices."""
        self._executor.shutdown()

    def _step_input(self, plan: StepPlan) -> StepInput:
        for admitted in plan.admitted:
            self._handle_of_row[admitted.row] = admitted.handle
            if self._proposer is not None:
                self._proposer.begin(admitted.row)
            if self._runs_first(admitted):
                self._counters.prompt_tokens += admitted.num_prompt
        return StepInput(
            plan,
            [self._unfinished[admitted.handle].sampling for admitted in plan.admitted],
            self._memory.drain_changes(),
            self._memory.drain_copies(),
            self._drain_sampled(),
        )

    def _runs_first(self, admitted: AdmittedRow) -> bool:
        """Whether a request has run neither here nor, as far as its front-end knows, elsewhere."""
        message = self._unfinished.get(admitted.handle)
        return not admitted.resumed and (message is None or not message.counted)

    def _drain_sampled(self) -> SampledTokens | None:
        sampled, self._sampled = self._sampled, []
        if not sampled:
            return None
        return SampledTokens(*(np.concatenate(parts) for parts in zip(*sampled, strict=True)))

    def _results(self, plan: StepPlan, result: StepOutput, committed: Committed) -> _StepResults:
        self._counters.ran_tokens += plan.num_tokens
        self._counters.step_buckets[bisect_left(STEP_BOUNDS, plan.num_tokens)] += 1
        self._counters.generation_tokens += len(committed.tokens)
        pooled = None if result.pooled is None else self._by_handle(result.pooled)
        if pooled is not None:
            # Their last parts come with tokens that nobody has generated.
            self._counters.generation_tokens -= int(np.isin(committed.handles, pooled.rows).sum())
        scheduled = {
            admitted.handle: (admitted.num_cached, admitted.waited)
            for admitted in plan.admitted
            if self._runs_first(admitted)
        }
        logprobs: _Logprobs = []
        if result.logprobs:
            for handle, index in zip(committed.handles.tolist(), committed.index.tolist(), strict=True):
                if index in result.logprobs:
                    logprobs.append((handle, result.logprobs[index]))
        prompt_logprobs: _Logprobs = []
        for row, entry in result.prompt_logprobs.items():
            handle = int(self._handle_of_row[row])
            message = self._unfinished.get(handle)
            if message is not None:
                # Not in place: a front-end in this process keeps the message.
                done = message.sampling.prompt_logprobs_done + len(entry.ranks)
                sampling = msgspec.structs.replace(message.sampling, prompt_logprobs_done=done)
                self._unfinished[handle] = msgspec.structs.replace(message, sampling=sampling)
                prompt_logprobs.append((handle, entry))
        for handle in committed.handles[committed.finished > 0].tolist():
            del self._unfinished[handle]
        drafted = self._count_drafts(plan, result, committed)
        return _StepResults(committed, scheduled, logprobs, prompt_logprobs, pooled, drafted)

    def _count_drafts(
        self, plan: StepPlan, result: StepOutput, committed: Committed
    ) -> dict[int, tuple[int, int]]:
        """Count a step's drafts; return those of each request and how many became its tokens, by handle."""
        if result.counts is None:
            return {}
        given = plan.num_drafts[plan.samples]
        # Drafts behind a request's end are no tokens of it.
        owners = np.repeat(np.arange(given.size), result.counts)[committed.index]
        accepted = np.minimum(np.bincount(owners, minlength=given.size), result.counts - 1)
        drafted = np.flatnonzero(given)
        self._counters.num_drafts += drafted.size
        self._counters.num_draft_tokens += int(given.sum())
        self._counters.num_accepted_tokens += int(accepted.sum())
        handles = self._handle_of_row[plan.rows[plan.samples][drafted]].tolist()
        return dict(zip(handles, zip(given[drafted].tolist(), accepted[drafted].tolist()), strict=True))

    def _by_handle(self, pooled: PooledRows) -> PooledRows:
        """Return parts of vectors by handle, without those of requests that have been aborted."""
        handles = self._handle_of_row[pooled.rows]
        wanted = np.array([handle in self._unfinished for handle in handles.tolist()], bool)
        return pooled._replace(rows=handles).only(wanted)

    def _deliver(self, results: _StepResults | None) -> dict[int, Outputs]:
        """Return the outputs of each client that has some."""
        refused, self._refused = self._refused, {}
        found = (
            {} if results is None else {client: _outputs_for(client, results) for client in results.clients()}
        )
        for client, errors in refused.items():
            found.setdefault(client, Outputs.empty()).errors = errors
        return found


def _outputs_for(client: int, results: _StepResults) -> Outputs:
    committed = results.committed
    mine = committed.handles >> NUMBER_BITS == client
    return Outputs(
        numbers=committed.handles[mine] & NUMBER_MASK,
        tokens=committed.tokens[mine],
        finished=committed.finished[mine],
        scheduled={
            handle & NUMBER_MASK: facts
            for handle, facts in results.scheduled.items()
            if handle >> NUMBER_BITS == client
        },
        logprobs=_for_client(results.logprobs, client),
        prompt_logprobs=_for_client(results.prompt_logprobs, client),
        pooled=None if results.pooled is None else _pooled_for(results.pooled, client),
        drafted={
            handle & NUMBER_MASK: counts
            for handle, counts in results.drafted.items()
            if handle >> NUMBER_BITS == client
        },
    )


def _sampled_tokens(plan: StepPlan, result: StepOutput) -> SampledTokens:
    """Return what a step has sampled, with rows and positions."""
    rows = plan.rows[plan.samples]
    positions = (plan.starts + plan.counts - plan.num_drafts)[plan.samples]
    if result.counts is not None:
        before = np.cumsum(result.counts) - result.counts
        offsets = np.arange(len(result.tokens)) - np.repeat(before, result.counts)
        rows = np.repeat(rows, result.counts)
        positions = (np.repeat(positions, result.counts) + offsets).astype(np.int32)
    return SampledTokens(rows, positions, result.tokens)


def _pooled_for(pooled: PooledRows, client: int) -> PooledRows | None:
    mine = pooled.only(pooled.rows >> NUMBER_BITS == client)
    return mine._replace(rows=mine.rows & NUMBER_MASK) if len(mine.rows) else None


def _for_client(entries: _Logprobs, client: int) -> _Logprobs:
    return [(handle & NUMBER_MASK, entry) for handle, entry in entries if handle >> NUMBER_BITS == client]


def _may_read_cache(params: SamplingParams) -> bool:
    """Whether a request may start from cached blocks; a prompt's log probabilities need every position."""
    if params.skip_reading_prefix_cache is not None:
        return not params.skip_reading_prefix_cache
    return params.prompt_logprobs is None
