"""Which rows run how many tokens in each step."""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchsched.batch import Batch
from batchsched.drafting import draft
from batchsched.emission import emit
from batchsched.errors import DuplicateHandle, NeverFits, PromptTooLong
from batchsched.flights import Flights
from batchsched.limits import Limits
from batchsched.memory import Memory
from batchsched.messages import Committed, Finish, Load, OpenedRow, StepPlan, StepResult
from batchsched.policy import Fcfs, Policy
from batchsched.preemption import Preemption, Recompute
from batchsched.request import Request
from batchsched.rows import Rows
from batchsched.shortage import relieve, who_makes_way
from batchsched.stages import in_turn
from batchsched.waiting import Entry, WaitingQueue


class Scheduler:
    """Continuous batching with chunked prefill under one token budget.

    There are no phases. Each row's computed positions catch up with its tokens, so chunks of prompts and
    single decoded tokens share a step. `plan` says what the next step runs, `commit` takes what it sampled.
    Steps may overlap: `plan` can be called again before earlier steps are committed, and then counts on the
    tokens those will sample. Results are committed in the plans' order.

    - A request has a row, and blocks, from its admission until it ends or is preempted.
    - It is admitted when all the tokens it has fit and leave some headroom; never in a step that was short of
      memory, nor while a preempted request is on its way back to the queue.
    - Blocks are given back only once no step in flight reads or writes them.

    `policy` is first come, first served and `preemption` recomputes unless others are given. `clock` gives
    seconds; it stamps arrivals and measures the time in the queue.
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
        self._rows = Rows(limits)
        self._entries: list[Entry | None] = [None] * limits.max_num_seqs
        self._closed: list[int] = []
        self._flights = Flights()
        self._turn = 0
        self._preemptions = 0
        self._paused = False

    def add(self, request: Request) -> None:
        """Put a request in the queue.

        It ends at `max_model_len` tokens, prompt included, if `max_tokens` would take it further.
        Raises DuplicateHandle, PromptTooLong or NeverFits, all of them RequestRefused.
        """
        if request.handle in self._live:
            raise DuplicateHandle(request.handle)
        size = request.tokens.size
        if size >= self.limits.max_model_len:
            raise PromptTooLong(size, self.limits.max_model_len)
        target = min(size + request.max_tokens, self.limits.max_model_len)
        # The last token is sampled and never run, so it needs no place.
        needed = -(-(target - 1) // self.memory.block_size)
        if needed > self.memory.num_blocks:
            raise NeverFits(needed, self.memory.num_blocks)
        arrival = self._clock() if request.arrival is None else request.arrival
        self._turn += 1
        entry = Entry(
            request,
            rank=self.policy.rank(request, self._turn, arrival),
            turn=self._turn,
            target=target,
            prefix=self.memory.prefix(request.tokens, request.extra, reuse=request.use_cache),
            tokens=request.tokens,
            queued_at=arrival,
            held=request.held,
        )
        self._live[request.handle] = entry
        self._waiting.push(entry)

    def abort(self, handle: int) -> bool:
        """End a request; nothing more is emitted for it. False if no such request is waiting or running."""
        entry = self._live.pop(handle, None)
        if entry is None:
            return False
        if entry.waiting:
            self._waiting.discard(entry)
            if entry.admitted:
                self.preemption.forget(self.memory, entry.prefix)
        else:
            self._rows.accepting[entry.row] = False
            self._retire(np.array([entry.row]))
        return True

    def hold(self, handle: int) -> bool:
        """Pass a request over, without blocking those behind it, until `release`.

        One that runs is preempted, unless its last token is in flight. False if no such request is waiting or
        running.
        """
        return self._set_held(handle, True)

    def release(self, handle: int) -> bool:
        """Let a request on hold go on, in its turn. False if no such request is waiting or running."""
        return self._set_held(handle, False)

    def _set_held(self, handle: int, held: bool) -> bool:
        entry = self._live.get(handle)
        if entry is None:
            return False
        if entry.waiting:
            self._waiting.hold(entry, held)
        else:
            entry.held = held
            if held:
                self._retire(np.array([entry.row]))
        return True

    def pause(self) -> None:
        """Plan no step until `resume`. Steps in flight are committed as ever, and rows keep their blocks."""
        self._paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._live)

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not yet committed."""
        return len(self._flights)

    def load(self) -> Load:
        return Load(
            running=len(self._live) - len(self._waiting),
            waiting=len(self._waiting),
            waiting_tokens=self._waiting.num_tokens,
            kv_usage=1 - self.memory.num_free / self.memory.num_blocks,
            preemptions=self._preemptions,
            held=self._waiting.num_held,
        )

    def draft(self, rows: ArrayLike, tokens: ArrayLike, counts: ArrayLike | None = None) -> None:
        """Give rows draft tokens, to be verified by their next step that samples.

        rows: int [n], distinct, such as `Committed.rows`. Those whose request has ended are passed over.
        tokens: int [n, k], what may follow each row's last known token.
        counts: how many of a row's are meant, int [n]; None for all k.

        To be called between a commit and the next plan. A row verifies as many as its `max_tokens`, the
        budget and free memory allow; nobody is preempted for drafts. Those that the sampling step does not
        verify are dropped, and so are those of a row that is preempted.

        Raises ValueError for more drafts than the request's `max_drafts`, or a row with a step in flight that
        samples: what it samples comes first.
        """
        draft(self._rows, rows, tokens, counts)

    def plan(self) -> StepPlan:
        """What the next step runs: rows that run already, in the policy's order, then waiting requests.

        Without rows there is nothing to run now. Raises RuntimeError if that could never change, because
        something else holds the memory.
        """
        if self._paused:
            return StepPlan.nothing()
        if self._waiting.has_ready and not self._rows.preempting:
            self._make_way()
        budget = self.limits.max_num_batched_tokens
        affordable = self._wanted().within(budget)
        batch, short = self._with_blocks(affordable)
        opened, admitted = self._admit(0 if short else budget - batch.num_tokens)
        return self._issue(batch.joined(admitted), opened)

    def _make_way(self) -> None:
        """Preempt rows for the first in the queue, if it ranks so far ahead and that lets it in."""
        if self.policy.quantum:
            self._rank_anew(self.policy.quantum)
        if self.policy.margin is None:
            return
        first = self._waiting.first()
        candidates = self._rows.behind(first.rank + self.policy.margin)
        if candidates.size == 0:
            return

        def has_room(gone: NDArray[np.intp], blocks: int) -> bool:
            staying = self._rows.line[~np.isin(self._rows.line, gone)]
            if staying.size + 1 > self.limits.max_num_seqs:
                return False
            return self._fits(first, staying, -blocks)

        self._retire(who_makes_way(candidates, self._rows, self.memory, self.policy, has_room))

    def _rank_anew(self, quantum: int) -> None:
        """Send rows that have used their quantum up to where they would be if they had just come."""
        line = self._rows.line
        generated = self._rows.expected[line] - self._rows.slice_start[line]
        for row in line[generated >= quantum].tolist():
            entry = self._entries[row]
            assert entry is not None
            self._turn += 1
            entry.turn = self._turn
            entry.rank = self.policy.rank(entry.request, self._turn, self._clock())
            self._rows.rank_anew(row, entry.rank, entry.turn)

    def _fits(self, entry: Entry, line: NDArray[np.intp], reserve: int) -> bool:
        """Whether all of a waiting request's tokens fit beside what the rows in `line` need, and headroom."""
        reserve += self.memory.needed(line, self._rows.expected[line])
        reserve += int(self.limits.headroom * line.size)
        return self.memory.fits(entry.prefix, entry.tokens.size, reserve)

    def _wanted(self) -> Batch:
        """All that the rows in line have not run yet, in chunks; with stages, of those whose turn it is."""
        line = self._rows.line
        starts = self._rows.planned[line]
        counts = self._rows.expected[line] - starts
        if self.limits.stages > 1:
            turns = in_turn(self._rows, counts, self._flights, self.limits.stages)
            line, starts, counts = line[turns], starts[turns], counts[turns]
        if not self._rows.speculating:
            return Batch(line, starts, np.minimum(counts, self.limits.chunk))
        counts = self._rows.with_drafts(line, counts)
        return Batch(line, starts, np.minimum(counts, self.limits.chunk)).only(counts > 0)

    def _with_blocks(self, batch: Batch) -> tuple[Batch, bool]:
        """The part of the batch whose blocks are there, or are taken now, and whether memory was short."""
        if batch.rows.size == 0:
            return batch, False
        short = self.memory.needed(batch.rows, batch.ends) > self.memory.num_free
        if short and self._rows.speculating:
            batch = batch.up_to(self._rows.expected[batch.rows])
            short = self.memory.needed(batch.rows, batch.ends) > self.memory.num_free
        if short:
            batch = relieve(batch, self._rows, self.memory, self.policy, self._retire)
        self.memory.grow(batch.rows, batch.ends)
        return batch, short

    def _admit(self, budget: int) -> tuple[list[OpenedRow], Batch]:
        """Rows for those first in the queue, while there are rows, budget, and blocks for all they have."""
        opened: list[OpenedRow] = []
        counts: list[int] = []
        # Whoever is on the way back to the queue was ahead of those in it.
        if not (budget and self._waiting.has_ready and self._rows.num_vacant) or self._rows.preempting:
            return opened, Batch.empty()
        line = self._rows.line
        # Blocks that are free and spoken for: rows are yet to take them for tokens they have.
        reserve = self.memory.needed(line, self._rows.expected[line])
        while budget and self._waiting.has_ready and self._rows.num_vacant:
            entry = self._waiting.first()
            size = entry.tokens.size
            headroom = int(self.limits.headroom * (line.size + len(opened)))
            if not self.memory.fits(entry.prefix, size, reserve + headroom):
                break
            row = self._open(self._waiting.pop())
            reserve += self.memory.needed(np.array([row.row]), np.array([size], np.int32))
            count = min(size - row.num_cached, self.limits.chunk, budget)
            budget -= count
            opened.append(row)
            counts.append(count)
        batch = Batch(
            np.array([row.row for row in opened], np.intp),
            np.array([row.num_cached for row in opened], np.int32),
            np.array(counts, np.int32),
        )
        if opened:
            self.memory.grow(batch.rows, batch.ends)
            self._rows.line_up(batch.rows)
        return opened, batch

    def _open(self, entry: Entry) -> OpenedRow:
        """Give a row to an entry that was in the queue."""
        row = self._rows.take()
        resumed = entry.admitted
        if resumed:
            num_cached = self.preemption.resume(self.memory, row, entry.prefix)
        else:
            num_cached = self.memory.open(row, entry.prefix)
            entry.num_cached = num_cached
            entry.admitted = True
        entry.row = row
        self._entries[row] = entry
        self._rows.begin(row, entry, num_cached)
        return OpenedRow(
            row=row,
            handle=entry.request.handle,
            tokens=entry.tokens,
            num_prompt=entry.request.tokens.size,
            num_cached=num_cached,
            resumed=resumed,
            waited=self._clock() - entry.queued_at,
        )

    def _issue(self, batch: Batch, opened: list[OpenedRow]) -> StepPlan:
        """Number the step and count on what it will sample."""
        if batch.rows.size == 0:
            self._require_progress()
            return StepPlan.nothing()
        num_drafts = drafts = None
        if self._rows.speculating:
            num_drafts = np.maximum(batch.ends - self._rows.expected[batch.rows], 0)
            drafts = self._rows.drafted(batch.rows, num_drafts)
        samples = self._rows.give(self._flights.newest + 1, batch.rows, batch.ends)
        self._flights.launch(batch, samples, num_drafts)
        closed = np.array(self._closed, np.int32)
        self._closed.clear()
        return StepPlan(
            self._flights.newest,
            batch.rows.astype(np.int32),
            batch.starts,
            batch.counts,
            samples,
            opened,
            closed,
            np.zeros_like(batch.counts) if num_drafts is None else num_drafts,
            np.empty(0, np.int32) if drafts is None else drafts,
        )

    def _require_progress(self) -> None:
        """With nothing to run and nothing in flight, nothing would ever run."""
        stuck = len(self._live) - self._waiting.num_held
        if stuck and not self._flights:
            free, blocks = self.memory.num_free, self.memory.num_blocks
            raise RuntimeError(
                f"{stuck} requests wait for KV blocks and no step is in flight to free any: "
                f"{free} of {blocks} are free, so something other than this scheduler holds the rest"
            )

    def commit(self, result: StepResult) -> Committed:
        """Take the tokens that the oldest step in flight sampled, and end the requests they end.

        Raises StepMismatch, with nothing changed, if the result is another step's or has not one token for
        each sampling row.
        """
        landed = self._flights.land(result)
        flight, rows = landed.flight, self._rows
        committed = emit(landed, rows)
        computed = flight.ends
        if flight.num_drafts is not None:
            computed = np.minimum(computed, rows.planned[flight.rows])
        alive = rows.accepting[flight.rows]
        if alive.all():
            self.memory.computed(flight.rows, computed, rows.tokens)
        else:
            self.memory.computed(flight.rows[alive], computed[alive], rows.tokens)
        self._end(committed.rows[committed.finished != Finish.NO])
        return committed

    def _end(self, ended: NDArray[np.int32]) -> None:
        """Finish the requests of these rows, and vacate the rows whose last step was committed just now."""
        if ended.size:
            for handle in self._rows.handle[ended].tolist():
                del self._live[handle]
            self._rows.accepting[ended] = False
        self._retire(ended)

    def _retire(self, rows: NDArray[np.integer]) -> None:
        """Give the rows no further step. They are vacated now if none is in flight, else with the last."""
        self._rows.retire(rows)
        for row in self._rows.departed(self._flights.landed):
            self._vacate(row)

    def _vacate(self, row: int) -> None:
        """Take the row from a request that has ended, or was preempted and takes its place in the queue."""
        entry = self._entries[row]
        assert entry is not None
        if self._rows.accepting[row]:
            self._preemptions += 1
            self.preemption.suspend(self.memory, row)
            entry.tokens = self._rows.known(row)
            entry.queued_at = self._clock()
            self._waiting.push(entry)
        else:
            self.memory.close(row)
        entry.row = -1
        self._entries[row] = None
        self._rows.vacate(row)
        self._closed.append(row)
