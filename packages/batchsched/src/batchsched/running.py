"""Running rows: columns of numbers indexed by row, the running queue, stop ids, sampled tokens and drafts."""

from heapq import heappop, heappush

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchsched.records import Committed, Finish, Limits, StepBatch
from batchsched.waiting import Entry

# Stop ids of a row that are compared as columns; a request with more has a set of its own.
_STOP_COLUMNS = 8
_NO_ID = -(2**31)


class StopIds:
    """The stop ids of every row, compared for a whole step at once."""

    def __init__(self, num_rows: int) -> None:
        # One array a column, so that only as many are compared as some row has needed: int32 [columns, rows].
        self._ids = np.full((_STOP_COLUMNS, num_rows), _NO_ID, np.int32)
        self._width = 0
        self._sets: list[frozenset[int]] = [frozenset()] * num_rows
        self._has_set = np.zeros(num_rows, np.bool_)

    def set(self, row: int, ids: tuple[int, ...]) -> None:
        """Replace the row's stop ids."""
        many = len(ids) > _STOP_COLUMNS
        self._has_set[row] = many
        self._sets[row] = frozenset(ids) if many else frozenset()
        self._ids[:, row] = _NO_ID
        if not many:
            self._ids[: len(ids), row] = ids
            self._width = max(self._width, len(ids))

    def match(self, rows: NDArray[np.intp], tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Whether `tokens[i]` is a stop id of `rows[i]`; bool [n]."""
        matched = np.zeros(rows.size, np.bool_)
        for column in self._ids[: self._width]:
            matched |= column[rows] == tokens
        for index in np.flatnonzero(self._has_set[rows]).tolist():
            matched[index] = int(tokens[index]) in self._sets[int(rows[index])]
        return matched


class RunningRows:
    """Columns of length max_num_seqs, indexed by row.

        tokens[row]   prompt ............ generated ........ in flight .........
                      0       planned ^          num_tokens ^       expected ^     target: where it must end

    tokens: int32 [max_num_seqs, max_model_len], valid up to num_tokens. Memory is touched as rows fill it.
    num_tokens: tokens known.
    expected: tokens known and those that steps in flight will sample at least; never beyond target.
    planned: leading positions that were given to a step, or came from the cache. Beyond expected only while
        drafts are in flight; when their step is committed it falls back to what was accepted.
    num_prompt: tokens of the prompt.
    num_cached: prompt tokens found in the prefix cache when the request first ran.
    min_stop: tokens from which on a stop id counts.
    max_drafts: most drafts that a step may verify. With any, the row is not planned ahead of what it samples.
    num_drafts: drafts for the next sampling step; they lie behind the known tokens.
    slice_start: `expected` at the time the row's quantum began.
    last_step: the last step the row is part of.
    is_live: whether the request has not ended, so that results are still wanted.
    is_running: whether the row is in the running queue.
    is_held: whether the row is on hold, so that only steps of its own run it.

    A row is free, then running, then draining until its last step is committed, then free again.
    """

    def __init__(self, limits: Limits) -> None:
        size = limits.max_num_seqs
        self.tokens = np.empty((size, limits.max_model_len), np.int32)
        self.num_tokens = np.zeros(size, np.int32)
        self.expected = np.zeros(size, np.int32)
        self.planned = np.zeros(size, np.int32)
        self.target = np.zeros(size, np.int32)
        self.num_prompt = np.zeros(size, np.int32)
        self.num_cached = np.zeros(size, np.int32)
        self.min_stop = np.zeros(size, np.int32)
        self.max_drafts = np.zeros(size, np.int32)
        self.num_drafts = np.zeros(size, np.int32)
        self.slice_start = np.zeros(size, np.int32)
        self.last_step = np.zeros(size, np.int64)
        self.handle = np.zeros(size, np.int64)
        self.rank = np.zeros(size, np.float64)
        self.arrival_index = np.zeros(size, np.int64)
        self.is_live = np.zeros(size, np.bool_)
        self.is_running = np.zeros(size, np.bool_)
        self.is_held = np.zeros(size, np.bool_)
        self.num_held = 0
        self._stop_ids = StopIds(size)
        self._num_speculating = 0
        # Rows in the policy's order; replaced, never written to, so a step may keep it.
        self.queue = np.empty(0, np.intp)
        # Lowest first; a sorted list is a heap.
        self._free = list(range(size))
        # A dict for its order.
        self._draining: dict[int, None] = {}

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    @property
    def draining(self) -> NDArray[np.intp]:
        return np.fromiter(self._draining, np.intp, len(self._draining))

    @property
    def preempting(self) -> bool:
        """Whether a draining row was preempted, and its request is to return to the waiting queue."""
        rows = self.draining
        return bool((self.is_live[rows] & (self.expected[rows] < self.target[rows])).any())

    @property
    def speculating(self) -> bool:
        """Whether any row may have drafts."""
        return self._num_speculating > 0

    def allocate(self) -> int:
        """Take the lowest free row."""
        return heappop(self._free)

    def begin(self, row: int, entry: Entry, num_computed: int) -> None:
        """Fill the columns of an allocated row. Its first `num_computed` tokens need no step."""
        request = entry.request
        size = entry.tokens.size
        self.tokens[row, :size] = entry.tokens
        self.num_tokens[row] = size
        self.expected[row] = size
        self.slice_start[row] = size
        self.max_drafts[row] = request.max_drafts
        self.num_drafts[row] = 0
        self._num_speculating += request.max_drafts > 0
        self.planned[row] = num_computed
        self.target[row] = entry.target
        self.num_prompt[row] = request.prompt.size
        self.num_cached[row] = entry.num_cached
        self.min_stop[row] = request.prompt.size + request.min_tokens
        self.handle[row] = request.handle
        self.is_live[row] = True
        self.is_held[row] = entry.held
        self.num_held += entry.held
        self.rank[row] = entry.rank
        self.arrival_index[row] = entry.arrival_index
        self._stop_ids.set(row, request.stop_ids)

    def enqueue(self, rows: NDArray[np.intp]) -> None:
        """Add rows to the running queue."""
        self.is_running[rows] = True
        self._set_queue(np.concatenate((self.queue, rows)))

    def rerank(self, row: int, rank: float, arrival_index: int) -> None:
        """Move a row of the running queue to another place, and begin its quantum."""
        self.rank[row] = rank
        self.arrival_index[row] = arrival_index
        self.slice_start[row] = self.expected[row]
        self._set_queue(self.queue)

    @property
    def ready(self) -> NDArray[np.intp]:
        """Rows of the running queue that are not on hold."""
        return self.queue[~self.is_held[self.queue]] if self.num_held else self.queue

    def release(self, row: int) -> None:
        """Let a row on hold run with the others."""
        self.num_held -= int(self.is_held[row])
        self.is_held[row] = False

    def ranked_after(self, rank: float) -> NDArray[np.intp]:
        """Return the rows of the running queue whose rank is higher."""
        return self.queue[np.searchsorted(self.rank[self.queue], rank, side="right") :]

    def held_or_ranked_after(self, rank: float) -> NDArray[np.intp]:
        """Return the rows of the running queue that are on hold or whose rank is higher."""
        return self.queue[self.is_held[self.queue] | (self.rank[self.queue] > rank)]

    def _set_queue(self, rows: NDArray[np.intp]) -> None:
        self.queue = rows[np.lexsort((self.arrival_index[rows], self.rank[rows]))]

    def known(self, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Whether each row may run: one that may have drafts awaits the tokens of its last step, bool [n]."""
        return (self.max_drafts[rows] == 0) | (self.expected[rows] == self.num_tokens[rows])

    def take_drafts(self, batch: StepBatch) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return how many drafts each row of the batch runs, int32 [n], and their ids, row after row."""
        num_drafts = np.maximum(batch.ends - self.expected[batch.rows], 0)
        owners, offsets = _ragged_index(num_drafts)
        rows = batch.rows[owners]
        return num_drafts, self.tokens[rows, self.num_tokens[rows] + offsets]

    def advance(self, step: int, batch: StepBatch) -> NDArray[np.bool_]:
        """Record that `step` runs the batch. Returns which of its rows sample a token, bool [n]."""
        rows, ends = batch.rows, batch.ends
        expected = self.expected[rows]
        samples = ends >= expected
        if self.speculating:
            self.num_drafts[rows[samples]] = 0
        expected += samples
        self.expected[rows] = expected
        self.planned[rows] = ends
        self.last_step[rows] = step
        last = expected == self.target[rows]
        if last.any():
            self.drain(rows[last])
        return samples

    def append_sampled(self, sampling: NDArray[np.intp], tokens: NDArray[np.int32]) -> Committed:
        """Append one sampled token to each of the rows `sampling` whose request has not ended."""
        index = np.flatnonzero(self.is_live[sampling])
        rows = sampling[index]
        tokens = tokens[index]
        lengths = self.num_tokens[rows]
        self.tokens[rows, lengths] = tokens
        lengths += 1
        self.num_tokens[rows] = lengths
        return self._committed(rows, tokens, lengths, self._finish(rows, lengths, tokens), index)

    def append_verified(
        self,
        sampling: NDArray[np.intp],
        tokens: NDArray[np.int32],
        counts: NDArray[np.int32],
        num_drafts: NDArray[np.int32],
    ) -> Committed:
        """Append the accepted drafts and the token after them to each row whose request has not ended.

        `tokens` (int32 [sum of counts]) has `counts[i]` tokens of row `sampling[i]`, which ran
        `num_drafts[i]` drafts. Tokens after one that ends the request are left out.
        """
        live = self.is_live[sampling]
        index = np.flatnonzero(np.repeat(live, counts))
        tokens = tokens[index]
        owners, offsets = _ragged_index(counts[live])
        rows = sampling[live][owners]
        positions = self.num_tokens[rows] + offsets
        self.tokens[rows, positions] = tokens
        lengths = (positions + 1).astype(np.int32)
        finished = self._finish(rows, lengths, tokens)
        ended = finished != Finish.NO
        num_ended_before = np.cumsum(ended) - ended
        first = np.arange(rows.size) - offsets
        kept = num_ended_before == num_ended_before[first]
        np.maximum.at(self.num_tokens, rows[kept], lengths[kept])
        self._roll_back(sampling[live & (num_drafts > 0)])
        return self._committed(rows[kept], tokens[kept], lengths[kept], finished[kept], index[kept])

    def _roll_back(self, rows: NDArray[np.intp]) -> None:
        """Undo what was planned for rejected drafts of these rows."""
        self.expected[rows] = self.num_tokens[rows]
        self.planned[rows] = self.num_tokens[rows] - 1

    def _finish(
        self, rows: NDArray[np.intp], lengths: NDArray[np.int32], tokens: NDArray[np.int32]
    ) -> NDArray[np.int8]:
        """Return a `Finish` for each of `tokens`, which bring their rows to `lengths`; int8 [n]."""
        finished = np.where(lengths == self.target[rows], np.int8(Finish.LENGTH), np.int8(Finish.NO))
        stopped = self._stop_ids.match(rows, tokens)
        if stopped.any():
            finished[stopped & (lengths >= self.min_stop[rows])] = Finish.STOP
        return finished

    def _committed(
        self,
        rows: NDArray[np.intp],
        tokens: NDArray[np.int32],
        lengths: NDArray[np.int32],
        finished: NDArray[np.int8],
        index: NDArray[np.intp],
    ) -> Committed:
        return Committed(
            handles=self.handle[rows],
            tokens=tokens,
            finished=finished,
            index=index.astype(np.int32),
            num_generated=lengths - self.num_prompt[rows],
            num_cached=self.num_cached[rows],
            rows=rows.astype(np.int32),
        )

    def set_drafts(self, rows: ArrayLike, tokens: ArrayLike, counts: ArrayLike | None) -> None:
        """Put drafts behind the rows' known tokens; see `Scheduler.draft`.

        Raises ValueError, with nothing changed.
        """
        given, ids, wanted = _as_drafts(rows, tokens, counts)
        running = self.is_running[given]
        given, ids, wanted = given[running], ids[running], wanted[running]
        many = given[wanted > self.max_drafts[given]]
        if many.size:
            raise ValueError(f"rows {many.tolist()} are given more drafts than their request's max_drafts")
        known = self.num_tokens[given]
        early = given[self.expected[given] > known]
        if early.size:
            raise ValueError(f"rows {early.tolist()} have a token in flight, which drafts could only follow")
        wanted = np.minimum(wanted, self.target[given] - known - 1)
        owners, offsets = _ragged_index(wanted)
        self.tokens[given[owners], known[owners] + offsets] = ids[owners, offsets]
        self.num_drafts[given] = wanted

    def drain(self, rows: NDArray[np.integer]) -> None:
        """Remove rows from the running queue; they are part of no further step."""
        if rows.size == 0:
            return
        self.is_running[rows] = False
        self.queue = self.queue[self.is_running[self.queue]]
        self._draining.update(dict.fromkeys(rows.tolist()))

    def pop_drained(self, last_committed: int) -> list[int]:
        """Return the draining rows whose last step is committed; they drain no longer and are to be freed."""
        drained = [row for row in self._draining if self.last_step[row] <= last_committed]
        for row in drained:
            del self._draining[row]
        return drained

    def free(self, row: int) -> None:
        """Return a drained row to the free ones."""
        self.release(row)
        self._num_speculating -= bool(self.max_drafts[row])
        self.is_live[row] = False
        heappush(self._free, row)

    def known_tokens(self, row: int) -> NDArray[np.int32]:
        """Return a copy of the row's tokens, int32 [num_tokens]."""
        return self.tokens[row, : self.num_tokens[row]].copy()


def _as_drafts(
    rows: ArrayLike, tokens: ArrayLike, counts: ArrayLike | None
) -> tuple[NDArray[np.intp], NDArray[np.int32], NDArray[np.int32]]:
    """Return rows (intp [n]), drafts (int32 [n, k]) and how many each row has (int32 [n])."""
    given = np.asarray(rows, np.intp)
    ids = np.asarray(tokens, np.int32)
    if given.ndim != 1 or ids.ndim != 2 or len(ids) != given.size:
        raise ValueError(f"drafts of {given.size} rows are [{given.size}, k], not {list(ids.shape)}")
    width = ids.shape[1]
    wanted = np.full(given.size, width, np.int32) if counts is None else np.asarray(counts, np.int32)
    if wanted.shape != given.shape or (wanted < 0).any() or (wanted > width).any():
        raise ValueError(f"counts of {given.size} rows are from 0 to {width} each, not {wanted.tolist()}")
    return given, ids, wanted


def _ragged_index(counts: NDArray[np.integer]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Index a ragged array with `counts[i]` values in row i: the row and column of each, both intp.

    For counts of [2, 0, 3] that is [0, 0, 2, 2, 2] and [0, 1, 0, 1, 2].
    """
    owners = np.repeat(np.arange(counts.size), counts)
    before = np.cumsum(counts) - counts
    return owners, np.arange(owners.size) - before[owners]
