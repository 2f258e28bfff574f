"""The engine core's loop: requests in, steps planned and run, tokens out. Knows no sockets and no text."""

import itertools
import logging
import traceback
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from batchsched import (
    Committed,
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
from enginecore.core.lockstep import Lockstep
from enginecore.core.policies import make_policy
from enginecore.data_parallel.meeting import Meeting
from enginecore.data_parallel.messages import ALONE, RankPlace
from enginecore.data_parallel.prefixes import request_salt
from enginecore.errors import ContextLengthError, EngineDeadError
from enginecore.executor.executor import Executor, make_executor
from enginecore.executor.step import NOT_FINITE, SampledTokens, StepInput, StepOutput, empty_step
from enginecore.messages import AddRequest, EngineStats, Outputs, PositionLogprobs
from enginecore.model_files import ModelFiles
from enginecore.plugins import import_all
from enginecore.sampling_params import SamplingParams
from kvblocks import PagedMemory

logger = logging.getLogger(__name__)

_NUMBER_BITS = 40
"""A request's handle is its client above this bit and the client's own number below it."""
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1

_NO_LOGITS = "the model's logits are NaN or infinite: its weights are damaged, or too large for its dtype"

_Logprobs = list[tuple[int, PositionLogprobs]]
"""By handle."""


def start_core(
    config: EngineConfig, files: ModelFiles, place: RankPlace = ALONE, meeting: Meeting | None = None
) -> "EngineCore":
    """Import plug-ins, start the workers, and return a core once they are ready.

    Raises:
        ConfigError: a plug-in or the policy cannot be had, before anything is started; or as `make_executor`.
        ModelError, EngineDeadError: as `make_executor`.
    """
    import_all(config.plugins, config.plugin_path)
    policy = make_policy(config)
    lockstep = Lockstep(place.rank) if config.shares_experts else None
    return EngineCore(config, make_executor(config, files, place, meeting), policy, lockstep)


class _Counters:
    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.step_tokens = 0


class _StepResults(NamedTuple):
    """One step's results for all clients, by handle."""

    committed: Committed
    scheduled: dict[int, tuple[int, float]]
    """Cached prompt tokens and seconds in the queue, of requests that first ran in this step."""
    logprobs: _Logprobs
    prompt_logprobs: _Logprobs


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
        lockstep: Lockstep | None = None,
    ) -> None:
        self._executor = executor
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
        )
        self._scheduler = Scheduler(
            Limits(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=limits.max_model_len,
                long_prefill_token_threshold=config.long_prefill_token_threshold,
                stages=config.pipeline_parallel_size,
            ),
            self._memory,
            policy or make_policy(config),
            Swap() if config.preemption_mode == "swap" else Recompute(),
        )
        self.error: EngineDeadError | None = None
        """Why the engine has ended; None while it runs."""
        self._in_flight: deque[StepPlan] = deque()
        self._sampled: list[tuple[StepPlan, np.ndarray]] = []
        """What was sampled since the last step was submitted, where the first stage does not know it."""
        self._unfinished: dict[int, AddRequest] = {}
        self._handle_of_row = np.zeros(config.max_num_seqs, np.int64)
        self._refused: dict[int, dict[int, str]] = {}
        self._counters = _Counters()
        self._clients: set[int] = set()
        self._stats_due = False
        self._request_salts = itertools.count()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to say."""
        runnable = self.has_unfinished if self.lockstep is None else self.lockstep.running
        return bool(self._in_flight or self._refused or self._stats_due) or runnable

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
        self._clients.add(client)
        handle = client << _NUMBER_BITS | message.number
        sampling = message.sampling
        salt = self._prefix_salt(message)
        try:
            self._scheduler.add(
                Request(
                    handle=handle,
                    prompt=message.prompt,
                    generated=message.generated,
                    max_tokens=message.max_tokens,
                    stop_ids=tuple(sampling.stop_ids),
                    min_tokens=sampling.params.min_tokens,
                    priority=message.priority,
                    extra=salt,
                    use_cache=_may_read_cache(sampling.params),
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
            handle = client << _NUMBER_BITS | number
            if self._unfinished.pop(handle, None) is not None:
                self._scheduler.abort(handle)
                self._stats_due = True

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
        plan = self._in_flight.popleft()
        result = self._executor.collect()
        if self.lockstep is not None and result.unfinished is not None:
            self.lockstep.answer(result.unfinished)
        if not len(plan.rows):
            return self._deliver(None) if self._refused or self._stats_due else {}
        committed = self._scheduler.commit(StepResult(plan.step, np.maximum(result.tokens, 0)))
        results = self._results(plan, result, self._without_broken(committed, result.tokens))
        if self._scheduler.limits.stages > 1:
            self._sampled.append((plan, result.tokens))
            # Now, as the first stage has nothing to do while the outputs are delivered.
            self._start_steps()
        return self._deliver(results)

    def _without_broken(self, committed: Committed, sampled: NDArray[np.int32]) -> Committed:
        """End the requests that have no logits to choose from, and return the tokens of the others."""
        broken = sampled[committed.index] == NOT_FINITE
        if not broken.any():
            return committed
        ends = committed.finished[broken] > 0
        for handle, ended in zip(committed.handles[broken].tolist(), ends.tolist(), strict=True):
            client, number = handle >> _NUMBER_BITS, handle & _NUMBER_MASK
            self._refused.setdefault(client, {})[number] = _NO_LOGITS
            del self._unfinished[handle]
            if not ended:
                self._scheduler.abort(handle)
        logger.error("%d requests ended: %s", int(broken.sum()), _NO_LOGITS)
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
            plan = self._scheduler.plan()
            if lockstep is None:
                if not len(plan.rows):
                    break
                step = self._step_input(plan)
            else:
                step = self._lockstep_input(plan, lockstep)
            self._executor.submit(step)
            self._in_flight.append(plan)

    def _lockstep_input(self, plan: StepPlan, lockstep: Lockstep) -> StepInput:
        empty = not len(plan.rows)
        asks = lockstep.start(empty=empty, unfinished=self.has_unfinished)
        return empty_step(asks) if empty else self._step_input(plan)._replace(unfinished=asks)

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
        self.require_alive()
        return self._executor.expert_loads()

    @property
    def descriptors(self) -> Sequence[int]:
        """File descriptors of which one becomes readable when a worker ends; see `check_workers`."""
        return self._executor.descriptors

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
            if not admitted.resumed:
                self._counters.prompt_tokens += admitted.num_prompt
        return StepInput(
            plan,
            [self._unfinished[admitted.handle].sampling for admitted in plan.admitted],
            self._memory.drain_changes(),
            self._memory.drain_copies(),
            self._drain_sampled(),
        )

    def _drain_sampled(self) -> SampledTokens | None:
        sampled, self._sampled = self._sampled, []
        if not sampled:
            return None
        columns = [
            (plan.rows[plan.samples], (plan.starts + plan.counts)[plan.samples], ids) for plan, ids in sampled
        ]
        return SampledTokens(*(np.concatenate(parts) for parts in zip(*columns, strict=True)))

    def _results(self, plan: StepPlan, result: StepOutput, committed: Committed) -> _StepResults:
        self._counters.step_tokens = plan.num_tokens
        self._counters.generation_tokens += len(committed.tokens)
        scheduled = {
            admitted.handle: (admitted.num_cached, admitted.waited)
            for admitted in plan.admitted
            if not admitted.resumed
        }
        logprobs: _Logprobs = []
        if result.logprobs:
            for handle, index in zip(committed.handles.tolist(), committed.index.tolist(), strict=True):
                if index in result.logprobs:
                    logprobs.append((handle, result.logprobs[index]))
        prompt_logprobs: _Logprobs = []
        for row, entry in result.prompt_logprobs.items():
            handle = int(self._handle_of_row[row])
            if handle in self._unfinished:
                self._unfinished[handle].sampling.prompt_logprobs_done += len(entry.ranks)
                prompt_logprobs.append((handle, entry))
        for handle in committed.handles[committed.finished > 0].tolist():
            del self._unfinished[handle]
        return _StepResults(committed, scheduled, logprobs, prompt_logprobs)

    def _deliver(self, results: _StepResults | None) -> dict[int, Outputs]:
        stats = self.stats()
        self._stats_due = False
        refused, self._refused = self._refused, {}
        found = {}
        for client in self._clients:
            outputs = _no_outputs() if results is None else _outputs_for(client, results)
            outputs.errors = refused.get(client, {})
            outputs.stats = stats
            found[client] = outputs
        return found


def _no_outputs() -> Outputs:
    return Outputs(numbers=np.empty(0, np.int64), tokens=np.empty(0, np.int32), finished=np.empty(0, np.int8))


def _outputs_for(client: int, results: _StepResults) -> Outputs:
    committed = results.committed
    mine = committed.handles >> _NUMBER_BITS == client
    return Outputs(
        numbers=committed.handles[mine] & _NUMBER_MASK,
        tokens=committed.tokens[mine],
        finished=committed.finished[mine],
        scheduled={
            handle & _NUMBER_MASK: facts
            for handle, facts in results.scheduled.items()
            if handle >> _NUMBER_BITS == client
        },
        logprobs=_for_client(results.logprobs, client),
        prompt_logprobs=_for_client(results.prompt_logprobs, client),
    )


def _for_client(entries: _Logprobs, client: int) -> _Logprobs:
    return [(handle & _NUMBER_MASK, entry) for handle, entry in entries if handle >> _NUMBER_BITS == client]


def _may_read_cache(params: SamplingParams) -> bool:
    """Whether a request may start from cached blocks; a prompt's log probabilities need every position."""
    if params.skip_reading_prefix_cache is not None:
        return not params.skip_reading_prefix_cache
    return params.prompt_logprobs is None
