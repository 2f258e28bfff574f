"""The engine core's loop: requests in, steps planned and run, tokens out. Knows no sockets and no text."""

import logging
import traceback
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from batchsched import Committed, NeverFits, Policy, PromptTooLong, RequestRefused, StepPlan, StepResult
from enginecore.config import EngineConfig
from enginecore.core.alone import AloneRequests
from enginecore.core.board import Board
from enginecore.core.counters import Counters
from enginecore.core.drafts import Proposer, draft
from enginecore.core.identity import NUMBER_BITS, split_handle
from enginecore.core.in_flight import StepsInFlight
from enginecore.core.lockstep import Lockstep
from enginecore.core.ngram import NgramProposer
from enginecore.core.request_table import RequestTable
from enginecore.core.scheduling import SchedulerRequests, make_memory, make_scheduler
from enginecore.core.step_log import PLAN, RUN, StepLog
from enginecore.core.step_results import StepResults
from enginecore.data_parallel.messages import LoadReport
from enginecore.data_parallel.prefixes import all_keys, kv_events
from enginecore.errors import ContextLengthError, EngineDeadError, NoTokenError
from enginecore.executor.executor import Executor
from enginecore.executor.step import NOT_FINITE, SampledTokens, StepInput, StepOutput, empty_step
from enginecore.messages import AddRequest, EngineStats, KVEvents, Outputs, StepsView

logger = logging.getLogger(__name__)

_NO_TOKEN = NoTokenError.START + (
    "the grammar is too ambiguous to be followed, or it and allowed_token_ids or bad_words leave none; or "
    "the model's logits are NaN or infinite"
)
_NO_LOGITS = "the model's logits are NaN or infinite: its weights are damaged, or too large for its dtype"


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
        self.lockstep = lockstep
        """Where the engine shares experts with others."""
        self.limits = limits = executor.limits
        self._memory = make_memory(config, limits)
        self._scheduler = make_scheduler(config, limits, self._memory, policy)
        self._scheduler_requests = SchedulerRequests(config, limits)
        self._proposer: Proposer | None = None
        if config.speculation is not None:
            self._proposer = proposer or NgramProposer(
                config.speculation, config.max_num_seqs, limits.max_model_len
            )
        self.error: EngineDeadError | None = None
        """Why the engine has ended; None while it runs."""
        self.failed_in_scheduling = False
        """Whether that was an error of the scheduler or its policy."""
        self._in_flight = StepsInFlight(board)
        self._sampled: list[SampledTokens] = []
        """What was sampled since the last step was submitted, where the first stage does not know it."""
        self._requests = RequestTable(config.max_num_seqs)
        self._alone = AloneRequests(self._scheduler, self._requests, self._in_flight)
        self._refused: dict[int, dict[int, str]] = {}
        """Errors of each client's requests that `step` has not returned yet."""
        self._counters = Counters()
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
        try:
            self._scheduler.add(self._scheduler_requests.make(handle, message))
        except RequestRefused as error:
            refusal: Exception = error
            if isinstance(error, PromptTooLong | NeverFits):
                refusal = ContextLengthError(self.limits.max_model_len, str(error))
            self._refuse(handle, str(refusal))
        except Exception as error:  # a policy's, which ranks what is added
            self.failed_in_scheduling = True
            self.fail(error)
        else:
            self._requests.add(handle, message)
            if message.alone:
                self._alone.add(handle)

    def abort(self, client: int, numbers: list[int]) -> None:
        """Forget requests; numbers that have ended already are passed over."""
        for number in numbers:
            handle = client << NUMBER_BITS | number
            if handle in self._requests:
                self._requests.remove(handle)
                self._scheduler.abort(handle)

    def forget(self, client: int) -> None:
        """Drop all requests of a client that has gone."""
        self._refused.pop(client, None)
        self.abort(client, self._requests.numbers(client))

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
        output = self._executor.collect()
        plan = self._in_flight.end()
        if self.step_log is not None:
            self.step_log.spent(RUN)
            if len(plan.rows):
                self.step_log.ran(plan)
        if self.lockstep is not None and output.unfinished is not None:
            self.lockstep.answer(output.unfinished)
        if not len(plan.rows):
            return self._deliver(None)
        results = self._commit(plan, output)
        if self._scheduler.limits.stages > 1:
            self._sampled.append(SampledTokens.of(plan, output))
            # Now, as the first stage has nothing to do while the outputs are delivered.
            self._start_steps()
        return self._deliver(results)

    def _start_steps(self) -> None:
        """Plan and submit steps until the executor has as many as it overlaps, or nothing can run."""
        lockstep = self.lockstep
        for _ in range(self._executor.depth - len(self._in_flight)):
            if lockstep is not None and not lockstep.may_start:
                break
            try:
                plan = self._alone.plan()
            except Exception:
                self.failed_in_scheduling = True
                raise
            if lockstep is not None:
                step_input = self._lockstep_input(plan, lockstep)
            elif len(plan.rows):
                step_input = self._step_input(plan)
            else:
                break
            handles = self._requests.handle_of_row[plan.rows]
            self._in_flight.begin(plan, handles, alone=self._alone.planned_alone)
            if self.step_log is not None:
                self.step_log.spent(PLAN)
            self._executor.submit(step_input)
            if self.step_log is not None:
                self.step_log.spent(RUN)

    def _lockstep_input(self, plan: StepPlan, lockstep: Lockstep) -> StepInput:
        empty = not len(plan.rows)
        asks = lockstep.start(empty=empty, unfinished=self.has_unfinished)
        return empty_step(asks) if empty else self._step_input(plan)._replace(unfinished=asks)

    def _step_input(self, plan: StepPlan) -> StepInput:
        sampling = []
        for admitted in plan.admitted:
            sampling.append(self._requests.begin_row(admitted))
            if self._proposer is not None:
                self._proposer.begin(admitted.row)
            if self._requests.runs_first(admitted):
                self._counters.prompt_tokens += admitted.num_prompt
        changes, copies = self._memory.drain_changes(), self._memory.drain_copies()
        sampled = SampledTokens.join(self._sampled) if self._sampled else None
        self._sampled.clear()
        return StepInput(plan, sampling, changes, copies, sampled)

    def _commit(self, plan: StepPlan, output: StepOutput) -> StepResults:
        """Give the requests of a step its tokens, and return all that it has computed for them."""
        sampled = StepResult(plan.step, np.maximum(output.tokens, 0), output.counts)
        committed = self._scheduler.commit(sampled)
        self._alone.commit(committed.handles)
        committed = self._without_broken(committed, output)
        if self._proposer is not None:
            draft(self._proposer, committed, self._scheduler)
        results = StepResults.of(plan, output, committed, self._requests)
        for handle, entry in results.prompt_logprobs:
            self._requests.report_prompt_logprobs(handle, entry)
        for handle in committed.handles[committed.finished > 0].tolist():
            self._requests.remove(handle)
        self._counters.count(plan.num_tokens, results)
        return results

    def _without_broken(self, committed: Committed, output: StepOutput) -> Committed:
        """End the requests that have no logits to choose from, and return the tokens of the others."""
        broken = output.tokens[committed.index] == NOT_FINITE
        if not broken.any():
            return committed
        columns = committed.handles[broken], committed.finished[broken] > 0, committed.index[broken]
        for handle, ended, index in zip(*(column.tolist() for column in columns), strict=True):
            guided = self._requests.remove(handle).sampling.guide is not None
            reason = output.errors.get(index, _NO_TOKEN if guided else _NO_LOGITS)
            self._refuse(handle, reason)
            if not ended:
                self._scheduler.abort(handle)
            logger.error("a request ended: %s", reason)
        return Committed(*(column[~broken] for column in committed))

    def _refuse(self, handle: int, reason: str) -> None:
        """Have the next outputs of a request's client say why it does not run."""
        client, number = split_handle(handle)
        self._refused.setdefault(client, {})[number] = reason

    def _deliver(self, results: StepResults | None) -> dict[int, Outputs]:
        """Return the outputs of each client that has some."""
        refused, self._refused = self._refused, {}
        found = {} if results is None else results.outputs()
        for client, errors in refused.items():
            found.setdefault(client, Outputs.empty()).errors = errors
        return found

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
        self._requests.clear()
        self._in_flight.clear()
        self._executor.shutdown()

    def require_alive(self) -> None:
        """Raise EngineDeadError if the engine has ended."""
        if self.error is not None:
            # A new one each time, as what is raised keeps the frames that it went through.
            raise EngineDeadError(str(self.error)) from self.error.__cause__

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

    def stats(self) -> EngineStats:
        """Return the state after the last step."""
        return self._counters.stats(self._scheduler.load(), self._memory)

    def steps_view(self, *, with_blocks: bool) -> StepsView:
        """Return what `step_log` has recorded since the last call, and a map of the KV cache's blocks."""
        assert self.step_log is not None, "nobody watches"
        return self.step_log.view(self._memory.pool.states() if with_blocks else None)

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
            step_seconds=self._in_flight.last_seconds,
            steps=self._in_flight.num_ended,
        )

    def prefix_events(self) -> KVEvents:
        """Return what has changed in the prefix cache since the last call."""
        return kv_events(self._memory.pool.events())

    def cached_prefixes(self) -> KVEvents:
        """Return all that the prefix cache holds."""
        return all_keys(self._memory.pool)

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes that no request holds."""
        self._memory.reset()

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

    def check(self) -> None:
        """Walk the memory's invariants; raises when a block is lost or owned twice."""
        self._memory.check()
