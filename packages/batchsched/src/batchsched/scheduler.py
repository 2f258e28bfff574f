"""The scheduler: decides which rows run how many tokens in each step."""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchsched.in_flight import InFlightSteps
from batchsched.memory import Memory
from batchsched.policy import Fcfs, Policy, Preemption, Recompute, preempt_for_shortage, victims_for_waiting
from batchsched.records import (
    AdmittedRow,
    Committed,
    DuplicateHandle,
    Finish,
    Limits,
    Load,
    NeverFits,
    PromptTooLong,
    Request,
    RequestRefused,
    StepBatch,
    StepPlan,
    StepResult,
)
from batchsched.running import RunningRows
from batchsched.waiting import Entry, WaitingQueue


class Scheduler:
    """Continuous batching with chunked prefill under one token budget.

    There are no phases. Each row's computed positions catch up with its tokens, so chunks of prompts and
    single decoded tokens share a step. `plan` decides the next step, `commit` takes the tokens it sampled.
    Steps may overlap: `plan` can be called again before earlier steps are committed, and then counts on the
    tokens those will sample. Results are committed in the plans' order.

    - A request has a row, and blocks, from its admission until it ends or is preempted.
    - It is admitted when all the tokens it has fit and leave the watermark free; never in a step that was
      short of memory, nor while a preempted request has yet to return to the waiting queue.
    - Blocks are freed only once no step in flight reads or writes them.
    - A request may begin on blocks that steps in flight, or its own first step, are yet to fill. So every
      plan with rows must be run, in order, whatever happens to its requests meanwhile.

    `policy` defaults to `Fcfs` and `preemption` to `Recompute`. `clock` gives seconds; it stamps arrivals and
    measures the time in the queue.
    """

    def __init__(
        self,
        limits: Limits,
        memory: Memory,
        policy: Policy | None = None,
        preemption: Preemption | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.memory = memory
        self.policy: Policy = policy or Fcfs()
        self.preemption: Preemption = preemption or Recompute()
        self._clock = clock
        self._live: dict[int, Entry] = {}
        self._waiting = WaitingQueue()
        self._rows = RunningRows(limits)
        self._entries: list[Entry | None] = [None] * limits.max_num_seqs
        self._freed: list[int] = []
        self._in_flight = InFlightSteps()
        self._last_arrival_index = 0
        self._preemptions = 0
        self._paused = False

    def add(self, request: Request) -> None:
        """Put a request in the waiting queue.

        It ends at `max_model_len` tokens, prompt included, if `max_tokens` would take it further.
        Raises DuplicateHandle, PromptTooLong, NeverFits, or RequestRefused, of which those are kinds.
        """
        target = self._target(request)
        arrival = self._clock() if request.arrival is None else request.arrival
        self._last_arrival_index += 1
        tokens = request.tokens
        entry = Entry(
            request,
            rank=self.policy.rank(request, self._last_arrival_index, arrival),
            arrival_index=self._last_arrival_index,
            target=target,
            prefix=self.memory.prefix(tokens, request.extra, reuse=request.use_cache),
            tokens=tokens,
            queued_at=arrival,
            held=request.held,
        )
        self._live[request.handle] = entry
        self._waiting.push(entry)

    def _target(self, request: Request) -> int:
        """Return the number of tokens at which the request ends, or refuse it."""
        if request.handle in self._live:
            raise DuplicateHandle(request.handle)
        num_prompt, context = request.prompt.size, self.limits.max_model_len
        if num_prompt >= context:
            raise PromptTooLong(num_prompt, context)
        if num_prompt + request.generated.size >= context:
            raise RequestRefused(
                f"{num_prompt} tokens of the prompt and {request.generated.size} generated ones fill the "
                f"model's context of {context}: at most {context - 1} leave room for a token"
            )
        target = min(num_prompt + request.max_tokens, context)
        # The last token is sampled and never run, so it needs no block.
        needed = self.memory.blocks_for(target - 1)
        if needed > self.memory.num_blocks:
            raise NeverFits(needed, self.memory.num_blocks)
        return target

    def abort(self, handle: int) -> bool:
        """End a request; it gets no more tokens. False if no such request is waiting or running."""
        entry = self._live.pop(handle, None)
        if entry is None:
            return False
        if entry.waiting:
            self._waiting.remove(entry)
            if entry.admitted:
                self.preemption.discard(self.memory, entry.prefix)
        else:
            self._rows.is_live[entry.row] = False
            self._drain(np.array([entry.row]))
        return True

    def hold(self, handle: int) -> bool:
        """Skip a request, without blocking those after it, until `release` or a `plan` of it alone.

        One that runs is preempted, unless its last token is in flight. False if no such request is waiting or
        running.
        """
        return self._set_held(handle, True)

    def release(self, handle: int) -> bool:
        """Resume a request on hold, in its place. False if no such request is waiting or running."""
        return self._set_held(handle, False)

    def _set_held(self, handle: int, held: bool) -> bool:
        entry = self._live.get(handle)
        if entry is None:
            return False
        if entry.waiting:
            self._waiting.set_held(entry, held)
        else:
            entry.held = held
            if held:
                self._drain(np.array([entry.row]))
            else:
                self._rows.release(entry.row)
        return True

    def pause(self) -> None:
        """Plan no step until `resume`. Steps in flight can be committed, and rows keep their blocks."""
        self._paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._live)

    @property
    def num_in_flight(self) -> int:
        """Number of steps planned and not yet committed."""
        return len(self._in_flight)

    def load(self) -> Load:
        """Return queue lengths and memory use."""
        return Load(
            running=len(self._live) - len(self._waiting),
            waiting=len(self._waiting),
            waiting_tokens=self._waiting.num_tokens,
            kv_usage=1 - self.memory.num_free / self.memory.num_blocks,
            preemptions=self._preemptions,
            held=self._waiting.num_held,
        )

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Tokens of all rows, int32 [max_num_seqs, max_model_len], to be read up to a row's `num_tokens`."""
        return self._rows.tokens

    @property
    def num_tokens(self) -> NDArray[np.int32]:
        """Number of known tokens of each row, int32 [max_num_seqs]; to be read only."""
        return self._rows.num_tokens

    def draft(self, rows: ArrayLike, tokens: ArrayLike, counts: ArrayLike | None = None) -> None:
        """Give rows draft tokens, to be verified by their next step that samples.

        rows: int [n], distinct, such as `Committed.rows`. Those whose request has ended are skipped.
        tokens: int [n, k], guesses of what follows each row's last known token.
        counts: number of drafts of each row, int [n]; None for all k.

        Call it between a commit and the next plan. A row verifies as many as its `max_tokens`, its share by
        `Limits.drafts_per_row` and free memory allow; no row is preempted for drafts. Those that the sampling
        step does not verify are dropped, and so are those of a row that is preempted.

        Raises ValueError for more drafts than the request's `max_drafts`, or a row with a step in flight that
        samples: the token it samples comes first.
        """
        self._rows.set_drafts(rows, tokens, counts)

    def plan(self, only: int | None = None) -> StepPlan:
        """Plan the next step: rows of the running queue, in the policy's order, then waiting requests.

        With `only`, a handle, the step runs that request alone, on hold or not, and others keep their rows
        and blocks. It is admitted before all that wait; where it has no room, rows on hold or ranked after it
        are preempted. One on hold stays so: other steps skip its row, which may be preempted like any.

        A plan without rows means that nothing can run now. Raises RuntimeError if that could never change,
        because something else holds the memory.
        """
        if self._paused:
            return StepPlan.empty()
        if only is not None:
            return self._plan_only(only)
        if self._waiting.has_ready and not self._rows.preempting:
            self._preempt_for_waiting()
        budget = self.limits.max_num_batched_tokens
        batch, short = self._grow(self._running_batch(self._rows.ready).within(budget))
        admitted, prefills = self._admit(0 if short else budget - batch.num_tokens)
        batch = batch.joined(prefills)
        if batch.rows.size == 0:
            # Rows on hold go on in steps of their own.
            self._require_progress(0 if self._rows.num_held else len(self._live) - self._waiting.num_held)
            return StepPlan.empty()
        return self._schedule(batch, admitted)

    def _plan_only(self, handle: int) -> StepPlan:
        """Plan a step of one request; see `plan`."""
        entry = self._live.get(handle)
        if entry is None:
            return StepPlan.empty()
        if not entry.waiting:
            row = np.array([entry.row])
            batch, _ = self._grow(self._running_batch(row[self._rows.is_running[row]]))
            return self._schedule(batch, []) if batch.rows.size else self._nothing_but(entry)
        if not self._rows.preempting:
            self._preempt_for(entry, self._rows.held_or_ranked_after(entry.rank))
        has_room = self._rows.has_free and self._has_room(entry, self._rows.queue, 0)
        if self._rows.preempting or not has_room:
            return self._nothing_but(entry)
        self._waiting.remove(entry)
        row, end = self._allocate(entry, self.limits.chunk)
        return self._schedule(self._begin([row], [end]), [row])

    def _nothing_but(self, entry: Entry) -> StepPlan:
        """Return an empty plan where a request cannot run alone before other rows make room for it."""
        others = self._rows.queue.size - (not entry.waiting and bool(self._rows.is_running[entry.row]))
        self._require_progress(0 if others else 1)
        return StepPlan.empty()

    def _has_room(self, entry: Entry, running: NDArray[np.intp], blocks: int) -> bool:
        """Whether a waiting request fits beside the rows `running` once `blocks` more are free."""
        if running.size + 1 > self.limits.max_num_seqs:
            return False
        reserve = self.memory.needed(running, self._rows.expected[running])
        reserve += int(self.limits.watermark * running.size)
        return self.memory.fits(entry.prefix, entry.tokens.size, reserve - blocks)

    def _preempt_for_waiting(self) -> None:
        """Preempt rows for the first waiting request, if its rank allows it and that lets it in."""
        if self.policy.quantum:
            self._end_quanta(self.policy.quantum)
        if self.policy.margin is None:
            return
        first = self._waiting.first()
        self._preempt_for(first, self._rows.ranked_after(first.rank + self.policy.margin))

    def _preempt_for(self, entry: Entry, candidates: NDArray[np.intp]) -> None:
        """Preempt as many of the candidates as let a waiting request in; none if all would not be enough."""
        if candidates.size == 0:
            return

        def has_room(victims: NDArray[np.intp], blocks: int) -> bool:
            staying = self._rows.queue[~np.isin(self._rows.queue, victims)]
            return self._has_room(entry, staying, blocks)

        self._drain(victims_for_waiting(candidates, self._rows, self.memory, self.policy, has_room))

    def _end_quanta(self, quantum: int) -> None:
        """Rank rows that have used their quantum up as if they had just arrived."""
        queue = self._rows.queue
        generated = self._rows.expected[queue] - self._rows.slice_start[queue]
        for row in queue[generated >= quantum].tolist():
            entry = self._entries[row]
            assert entry is not None
            self._last_arrival_index += 1
            entry.arrival_index = self._last_arrival_index
            entry.rank = self.policy.rank(entry.request, entry.arrival_index, self._clock())
            self._rows.rerank(row, entry.rank, entry.arrival_index)

    def _running_batch(self, rows: NDArray[np.intp]) -> StepBatch:
        """All tokens that running rows have yet to run, in chunks; with stages, of the next microbatch."""
        starts = self._rows.planned[rows]
        counts = self._rows.expected[rows] - starts
        if self.limits.stages > 1:
            picked = self._in_flight.pick_microbatch(self._rows, rows, counts, self.limits.stages)
            rows, starts, counts = rows[picked], starts[picked], counts[picked]
        batch = StepBatch(rows, starts, np.minimum(counts, self.limits.chunk))
        if not self._rows.speculating:
            return batch
        batch = batch.only(self._rows.known(rows))
        num_drafts = self._rows.num_drafts[batch.rows]
        most = self.limits.drafts_per_row(batch.num_tokens, int(np.count_nonzero(num_drafts)))
        counts = batch.counts + np.minimum(num_drafts, most)
        return batch._replace(counts=np.minimum(counts, self.limits.chunk)).only(counts > 0)

    def _grow(self, batch: StepBatch) -> tuple[StepBatch, bool]:
        """Allocate the batch's blocks. Returns the part of it that has them, and whether memory was short.

        Short of memory, drafts are cut first; then rows are preempted.
        """
        if batch.rows.size == 0:
            return batch, False
        short = self.memory.needed(batch.rows, batch.ends) > self.memory.num_free
        if short and self._rows.speculating:
            batch = batch.up_to(self._rows.expected[batch.rows])
            short = self.memory.needed(batch.rows, batch.ends) > self.memory.num_free
        if short:
            batch = preempt_for_shortage(batch, self._rows, self.memory, self.policy, self._drain)
        self.memory.grow(batch.rows, batch.ends)
        return batch, short

    def _admit(self, budget: int) -> tuple[list[AdmittedRow], StepBatch]:
        """Admit the first waiting requests while there are rows, budget, and blocks for all their tokens."""
        admitted: list[AdmittedRow] = []
        ends: list[int] = []
        # A request that is about to return to the queue goes before those in it.
        if not (budget and self._waiting.has_ready and self._rows.has_free) or self._rows.preempting:
            return admitted, StepBatch.empty()
        running = self._rows.queue
        # Blocks that are free but promised: running rows have yet to take them for tokens they have.
        promised = self.memory.needed(running, self._rows.expected[running])
        while budget and self._waiting.has_ready and self._rows.has_free:
            entry = self._waiting.first()
            size = entry.tokens.size
            watermark = int(self.limits.watermark * (running.size + len(admitted)))
            if not self.memory.fits(entry.prefix, size, promised + watermark):
                break
            row, end = self._allocate(self._waiting.pop(), budget)
            if end < size:
                promised += self.memory.needed(np.array([row.row]), np.array([size], np.int32))
            budget -= end - row.num_cached
            admitted.append(row)
            ends.append(end)
        return admitted, self._begin(admitted, ends)

    def _begin(self, admitted: list[AdmittedRow], ends: list[int]) -> StepBatch:
        """Let admitted rows run, up to the position `ends[i]` each in their first step."""
        starts = np.array([row.num_cached for row in admitted], np.int32)
        batch = StepBatch(
            np.array([row.row for row in admitted], np.intp), starts, np.array(ends, np.int32) - starts
        )
        if admitted:
            self._rows.enqueue(batch.rows)
        return batch

    def _allocate(self, entry: Entry, budget: int) -> tuple[AdmittedRow, int]:
        """Allocate a row for an entry that has left the waiting queue, with the blocks of its first step.

        Returns the position after that step, in which it runs `budget` tokens at most. The blocks are taken
        at once, so that the next request of the same step finds those that this one fills.
        """
        row, request = self._rows.allocate(), entry.request
        num_cached = self.memory.allocate(row, entry.prefix)
        end = min(entry.tokens.size, num_cached + min(self.limits.chunk, budget))
        self.memory.grow(np.array([row]), np.array([end], np.int32))
        resumed = entry.admitted
        if not resumed:
            entry.num_cached = min(num_cached, request.prompt.size)
            entry.admitted = True
        entry.row = row
        self._entries[row] = entry
        self._rows.begin(row, entry, num_cached)
        waited = self._clock() - entry.queued_at
        admitted = AdmittedRow(
            row, request.handle, entry.tokens, request.prompt.size, num_cached, resumed, waited
        )
        return admitted, end

    def _schedule(self, batch: StepBatch, admitted: list[AdmittedRow]) -> StepPlan:
        """Put the batch in flight as the next step, and return its plan."""
        num_drafts = drafts = None
        if self._rows.speculating:
            num_drafts, drafts = self._rows.take_drafts(batch)
        samples = self._rows.advance(self._in_flight.last_planned + 1, batch)
        self._in_flight.push(batch, samples, num_drafts)
        freed = np.array(self._freed, np.int32)
        self._freed.clear()
        return StepPlan(
            self._in_flight.last_planned,
            batch.rows.astype(np.int32),
            batch.starts,
            batch.counts,
            samples,
            admitted,
            freed,
            np.zeros_like(batch.counts) if num_drafts is None else num_drafts,
            np.empty(0, np.int32) if drafts is None else drafts,
        )

    def _require_progress(self, stuck: int) -> None:
        """Raise if as many requests cannot run now, and no step in flight could change that."""
        if stuck and not self._in_flight:
            free, blocks = self.memory.num_free, self.memory.num_blocks
            raise RuntimeError(
                f"{stuck} requests wait for KV blocks and no step is in flight to free any: "
                f"{free} of {blocks} are free, so something other than this scheduler holds the rest"
            )

    def commit(self, result: StepResult) -> Committed:
        """Append the tokens that the oldest step in flight sampled, and end the requests they finish.

        Raises StepMismatch, with nothing changed, if the result is another step's or has not one token for
        each sampling row.
        """
        step, tokens, counts = self._in_flight.pop(result)
        rows, computed = self._rows, step.ends
        if counts is None or step.num_drafts is None:
            committed = rows.append_sampled(step.sampling, tokens)
        else:
            committed = rows.append_verified(step.sampling, tokens, counts, step.num_drafts)
            computed = np.minimum(computed, rows.planned[step.rows])
        live = rows.is_live[step.rows]
        if live.all():
            self.memory.commit(step.rows, computed, rows.tokens)
        else:
            self.memory.commit(step.rows[live], computed[live], rows.tokens)
        finished = committed.rows[committed.finished != Finish.NO]
        if finished.size:
            for handle in rows.handle[finished].tolist():
                del self._live[handle]
            rows.is_live[finished] = False
        self._drain(finished)
        return committed

    def _drain(self, rows: NDArray[np.integer]) -> None:
        """Plan no further step for the rows, and free every row of which no step is in flight any more."""
        self._rows.drain(rows)
        for row in self._rows.pop_drained(self._in_flight.last_committed):
            self._free(row)

    def _free(self, row: int) -> None:
        """Free the row of a request that has ended, or was preempted and returns to the waiting queue."""
        entry = self._entries[row]
        assert entry is not None
        if self._rows.is_live[row]:
            self._preemptions += 1
            self.preemption.preempt(self.memory, row)
            entry.tokens = self._rows.known_tokens(row)
            entry.queued_at = self._clock()
            self._waiting.push(entry)
        else:
            self.memory.free(row)
        entry.row = -1
        self._entries[row] = None
        self._rows.free(row)
        self._freed.append(row)
