"""What the scheduler knows of each row: columns of numbers, and which rows are taken, in line or leaving."""

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from batchsched.limits import Limits
from batchsched.messages import Finish
from batchsched.policy import Line
from batchsched.runs import runs
from batchsched.stops import StopIds
from batchsched.waiting import Entry


class Rows:
    """Columns of length max_num_seqs, indexed by row.

        tokens[row]   prompt ............ generated ........ in flight .........
                      0       planned ^          num_tokens ^       expected ^     target: where it must end

    tokens: int32 [max_num_seqs, max_model_len], good up to num_tokens. Memory is touched as rows fill it.
    num_tokens: tokens known.
    expected: tokens known and those that steps in flight will sample at least; never beyond target.
    planned: leading positions that were given to a step, or came from the cache. Beyond expected only while
        drafts are in flight; when their step is committed it falls back to what was accepted.
    min_stop: tokens from which on a stop id counts.
    max_drafts: most drafts that a step may verify. With any, the row is not planned ahead of what it samples.
    num_drafts: drafts for the next sampling step; they lie behind the known tokens.
    slice_start: what `expected` was when the row's quantum began.
    last_step: the last step the row was given.
    accepting: whether results are still wanted, which they are not once the request has ended.
    in_line: whether the row is to be given further steps.

    A row is vacant, then in line, then departing until its last step is committed, then vacant again.
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
        self.accepting = np.zeros(size, np.bool_)
        self.in_line = np.zeros(size, np.bool_)
        self._rank = np.zeros(size, np.float64)
        self._turn = np.zeros(size, np.int64)
        self._stop_ids = StopIds(size)
        self._num_speculating = 0
        # In rank order; replaced, never written to, so a step may keep it.
        self.line = np.empty(0, np.intp)
        # Lowest first; a sorted list is a heap.
        self._vacant = list(range(size))
        # A dict for its order.
        self._departing: dict[int, None] = {}

    @property
    def num_vacant(self) -> int:
        return len(self._vacant)

    @property
    def departing(self) -> NDArray[np.intp]:
        return np.fromiter(self._departing, np.intp, len(self._departing))

    @property
    def preempting(self) -> bool:
        """Whether a departing row is to come back, since its request has not ended and will not by itself."""
        rows = self.departing
        return bool((self.accepting[rows] & (self.expected[rows] < self.target[rows])).any())

    def take(self) -> int:
        """The lowest vacant row."""
        return heappop(self._vacant)

    def begin(self, row: int, entry: Entry, num_computed: int) -> None:
        """Fill a row that was taken. The first `num_computed` tokens need no step."""
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
        self.num_prompt[row] = request.tokens.size
        self.num_cached[row] = entry.num_cached
        self.min_stop[row] = request.tokens.size + request.min_tokens
        self.handle[row] = request.handle
        self.accepting[row] = True
        self._rank[row] = entry.rank
        self._turn[row] = entry.turn
        self._stop_ids.set(row, request.stop_ids)

    def line_up(self, rows: NDArray[np.intp]) -> None:
        """Put rows that have begun in line."""
        self.in_line[rows] = True
        self._sort(np.concatenate((self.line, rows)))

    def rank_anew(self, row: int, rank: float, turn: int) -> None:
        """Give a row in line another place there, and begin its quantum."""
        self._rank[row] = rank
        self._turn[row] = turn
        self.slice_start[row] = self.expected[row]
        self._sort(self.line)

    def standing(self, rows: NDArray[np.intp]) -> Line:
        """What a policy looks at when one of these rows, in line order, is to give way."""
        return Line(self._rank[rows], self.planned[rows])

    def behind(self, rank: float) -> NDArray[np.intp]:
        """The rows in line whose rank is higher."""
        return self.line[np.searchsorted(self._rank[self.line], rank, side="right") :]

    def _sort(self, line: NDArray[np.intp]) -> None:
        self.line = line[np.lexsort((self._turn[line], self._rank[line]))]

    @property
    def speculating(self) -> bool:
        """Whether any row may have drafts."""
        return self._num_speculating > 0

    def draft(self, rows: NDArray[np.intp], tokens: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        """Put `counts[i]` of `tokens[i]` behind each row's known tokens, or as many as there can be."""
        known = self.num_tokens[rows]
        counts = np.minimum(counts, self.target[rows] - known - 1)
        owners, offsets = runs(counts)
        self.tokens[rows[owners], known[owners] + offsets] = tokens[owners, offsets]
        self.num_drafts[rows] = counts

    def drafted(self, rows: NDArray[np.intp], num_drafts: NDArray[np.int32]) -> NDArray[np.int32]:
        """The first `num_drafts[i]` drafts of each row, one row after the other."""
        owners, offsets = runs(num_drafts)
        rows = rows[owners]
        return self.tokens[rows, self.num_tokens[rows] + offsets]

    def with_drafts(self, rows: NDArray[np.intp], counts: NDArray[np.int32]) -> NDArray[np.int32]:
        """How many tokens the rows want to run, that would run `counts` by what is expected of them."""
        known = (self.max_drafts[rows] == 0) | (self.expected[rows] == self.num_tokens[rows])
        return np.where(known, counts + self.num_drafts[rows], 0).astype(np.int32)

    def give(self, step: int, rows: NDArray[np.intp], ends: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Count on `step` to run the rows up to `ends`. Returns which of them sample a token, bool [n]."""
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
            self.retire(rows[last])
        return samples

    def append(self, rows: NDArray[np.intp], tokens: NDArray[np.int32]) -> NDArray[np.int8]:
        """Add the token that was sampled to each of the rows. Returns a `Finish` each, int8 [n]."""
        ends = self.num_tokens[rows]
        self.tokens[rows, ends] = tokens
        ends += 1
        self.num_tokens[rows] = ends
        return self._finish(rows, ends, tokens)

    def append_runs(
        self, rows: NDArray[np.intp], tokens: NDArray[np.int32], counts: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int8]]:
        """Add `counts[i]` tokens to each of the rows, none behind one that ends the request.

        `tokens` is int32 [sum of counts]. Returns the length that each token brings its row to, 0 if it came
        after the end and was left out, and a `Finish` each; int32 and int8 [sum of counts].
        """
        owners, offsets = runs(counts)
        each = rows[owners]
        positions = self.num_tokens[each] + offsets
        self.tokens[each, positions] = tokens
        ends = (positions + 1).astype(np.int32)
        finished = self._finish(each, ends, tokens)
        so_far = np.cumsum(finished != Finish.NO) - (finished != Finish.NO)
        emitted = so_far == so_far[np.arange(each.size) - offsets]
        ends[~emitted] = 0
        np.maximum.at(self.num_tokens, each, ends)
        return ends, finished

    def settle(self, rows: NDArray[np.intp]) -> None:
        """Take back what was planned for drafts of these rows that were not accepted."""
        self.expected[rows] = self.num_tokens[rows]
        self.planned[rows] = self.num_tokens[rows] - 1

    def _finish(
        self, rows: NDArray[np.intp], ends: NDArray[np.int32], tokens: NDArray[np.int32]
    ) -> NDArray[np.int8]:
        """Whether rows end with `tokens` that bring them to the lengths `ends`."""
        finished = np.where(ends == self.target[rows], np.int8(Finish.LENGTH), np.int8(Finish.NO))
        stopped = self._stop_ids.hit(rows, tokens)
        if stopped.any():
            finished[stopped & (ends >= self.min_stop[rows])] = Finish.STOP
        return finished

    def retire(self, rows: NDArray[np.integer]) -> None:
        """Give the rows no further step."""
        if rows.size == 0:
            return
        self.in_line[rows] = False
        self.line = self.line[self.in_line[self.line]]
        self._departing.update(dict.fromkeys(rows.tolist()))

    def departed(self, committed: int) -> list[int]:
        """Rows whose last step is committed now. They depart no longer; each is to be vacated."""
        gone = [row for row in self._departing if self.last_step[row] <= committed]
        for row in gone:
            del self._departing[row]
        return gone

    def vacate(self, row: int) -> None:
        self._num_speculating -= bool(self.max_drafts[row])
        self.accepting[row] = False
        heappush(self._vacant, row)

    def known(self, row: int) -> NDArray[np.int32]:
        """A copy of the row's tokens, int32 [num_tokens]."""
        return self.tokens[row, : self.num_tokens[row]].copy()
