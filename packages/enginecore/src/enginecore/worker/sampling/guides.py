"""Grammars of the running rows, and the masks of the tokens that may come next.

Masks are made on threads of their own, from the tokens in the input buffers, while the model runs. Each row
has a matcher that has consumed the row's generated tokens up to a place; for the positions that a step
samples it is moved forward or back to there, so that a row that was preempted, resumed elsewhere or given
drafts has the masks of one that ran undisturbed.
"""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from enginecore.grammars import GrammarError, Grammars
from enginecore.messages import RowSampling
from enginecore.worker.upload import upload_integers
from pagedattn import apply_token_bitmask

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

logger = logging.getLogger(__name__)

_WORD = 32
_COMPILING_THREADS = 2


class TokenMasks(NamedTuple):
    """Masks of some rows of a batch."""

    places: np.ndarray
    """int64 [k]: the row of each in the logits."""
    bits: Tensor
    """int32 [k, ceil(vocab / 32)]; see `pagedattn.apply_token_bitmask`."""

    def to(self, device: torch.device) -> "TokenMasks":
        """Return them with `bits` on `device`."""
        return TokenMasks(self.places, self.bits.to(device, non_blocking=True))

    def apply(self, logits: Tensor, members: np.ndarray | None = None) -> None:
        """Set what may not come to -inf, in place, in logits [m, vocab] of the batch's rows `members` int[m].

        `members` ascend; None for all rows.
        """
        rows, bits = self.places, self.bits
        if members is not None:
            rows = np.searchsorted(members, self.places)
            inside = members[np.minimum(rows, len(members) - 1)] == self.places
            if not inside.any():
                return
            if not inside.all():
                (kept,) = upload_integers([np.flatnonzero(inside)], bits.device)
                rows, bits = rows[inside], bits[kept]
        if len(rows) == len(logits) and (rows == np.arange(len(rows))).all():
            apply_token_bitmask(logits, bits)
        else:
            apply_token_bitmask(logits, bits, upload_integers([rows], logits.device)[0])


class _GuidedRow:
    """One row's grammar and how far its matcher is."""

    __slots__ = (
        "accepted",
        "compiling",
        "failed",
        "known",
        "matcher",
        "may_end",
        "min_tokens",
        "num_prompt",
        "stops",
    )

    def __init__(self, num_prompt: int, sampling: RowSampling, compiling: "Future[LLMatcher]") -> None:
        self.compiling = compiling
        self.matcher: LLMatcher | None = None
        self.failed: str | None = None
        """Why no mask can be made any more."""
        self.num_prompt = num_prompt
        self.known = num_prompt
        """Tokens of the row that have been given to the matcher, the prompt's among them."""
        self.accepted = 0
        """Generated tokens that the matcher holds: fewer than it was given where it refused one."""
        self.stops = np.array(sampling.stop_ids, np.int64)
        self.may_end = sampling.guide is not None and sampling.guide.may_end
        self.min_tokens = sampling.params.min_tokens

    @property
    def off_grammar(self) -> bool:
        """Whether a token came that the grammar refuses, after its end: masks matter no more."""
        return self.accepted < self.known - self.num_prompt

    def advance(self, length: int, ids: list[int]) -> None:
        """Have the matcher hold the row's first `length` tokens; `ids` are those from `known` on, if any."""
        if self.matcher is None and self.failed is None:
            try:
                self.matcher = self.compiling.result()
            except GrammarError as error:  # which the front-end would have found, by the same rules
                self._fail(str(error))
        if self.matcher is None:
            return
        kept = min(self.accepted, length - self.num_prompt)
        if kept < self.accepted:
            self.matcher.rollback(self.accepted - kept)
            self.accepted = kept
        if ids and not self.off_grammar:
            self.accepted += self.matcher.try_consume_tokens(ids)
        self.known = length
        self.check()

    def check(self) -> None:
        """Take note of a matcher that cannot go on, as a grammar that is too ambiguous makes it."""
        if self.matcher is not None and self.matcher.is_error():
            self._fail(self.matcher.get_error())

    def _fail(self, reason: str) -> None:
        logger.warning("a row's grammar cannot be followed: %s", " ".join(reason.split())[:200])
        self.failed = reason
        self.matcher = None


class _Fetch(NamedTuple):
    """Tokens on their way to the host."""

    ids: Tensor
    copied: "torch.cuda.Event | None"

    def get(self) -> list[int]:
        if self.copied is not None:
            self.copied.synchronize()
        return self.ids.tolist()


class _Turn(NamedTuple):
    """Sampled positions of one guided row in a step."""

    row: _GuidedRow
    lengths: list[int]
    """Tokens before each sampled position, ascending."""
    first: int
    """The mask of the first of them."""
    tokens: slice
    """Of the fetched ids, those from `known` on."""


class Guides:
    """Grammars of the rows that have one, on the rank that samples."""

    def __init__(self, max_rows: int, load: Callable[[], Grammars], *, threads: int) -> None:
        """`load` makes the compiler, on a thread, when the first guided row is admitted. Masks are made in
        `threads` threads."""
        self._guided = np.zeros(max_rows, bool)
        self._rows: dict[int, _GuidedRow] = {}
        self._load = load
        self._threads = threads
        self._loading: Future[Grammars] | None = None
        self._compilers: ThreadPoolExecutor | None = None
        self._masker: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None

    def set(self, row: int, num_prompt: int, sampling: RowSampling) -> None:
        """Take a row that is admitted; the first `num_prompt` of its tokens are the prompt."""
        self.free([row])
        if sampling.guide is None:
            return
        self._guided[row] = True
        self._rows[row] = _GuidedRow(num_prompt, sampling, self._compile(sampling.guide.grammar))

    def free(self, rows: Iterable[int]) -> None:
        """Forget rows that ended or were preempted."""
        for row in rows:
            if self._rows.pop(row, None) is not None:
                self._guided[row] = False

    def start(self, rows: np.ndarray, lengths: np.ndarray, tokens: Tensor) -> "Future[TokenMasks] | None":
        """Start making the masks of a step, on the host; None where no row that samples has a grammar.

        The step samples a token after the first `lengths[i]` tokens of `rows[i]`, int[n] both; a row that
        samples at several positions, with drafts, stands as many times. `tokens` int32 [max_rows, max_len]
        are those of all rows, on the device; those before `lengths` are there when the device comes to them.
        """
        if not self._rows:
            return None
        places = np.flatnonzero(self._guided[rows])
        if not len(places):
            return None
        # Positions of one row stand side by side, the earliest first.
        places = places[np.lexsort((lengths[places], rows[places]))]
        turns: list[_Turn] = []
        of_rows, starts, counts = rows[places], [], []
        of_lengths = lengths[places].tolist()
        bounds = [0, *(np.flatnonzero(np.diff(of_rows)) + 1).tolist(), len(places)]
        fetched = 0
        for first, stop in pairwise(bounds):
            row = self._rows[int(of_rows[first])]
            asked = of_lengths[first:stop]
            begin = min(row.known, asked[0])
            count = asked[-1] - begin
            turns.append(_Turn(row, asked, first, slice(fetched, fetched + count)))
            starts.append(begin)
            counts.append(count)
            fetched += count
        fetch = _fetch(tokens, of_rows[bounds[:-1]], np.array(starts), np.array(counts))
        if self._masker is None:
            self._masker = ThreadPoolExecutor(1, "masks")
        return self._masker.submit(self._make, turns, places, fetch, tokens.is_cuda)

    def _compile(self, grammar: str) -> "Future[LLMatcher]":
        if self._compilers is None:
            self._compilers = ThreadPoolExecutor(_COMPILING_THREADS, "grammars")
        if self._loading is None:
            self._loading = self._compilers.submit(self._load)
        loading = self._loading
        return self._compilers.submit(lambda: loading.result().matcher(grammar))

    def _make(self, turns: list[_Turn], places: np.ndarray, fetch: _Fetch, pinned: bool) -> TokenMasks:
        ids = fetch.get()
        grammars = self._grammars()
        masks = torch.full(
            (len(places), -(-grammars.vocab_size // _WORD)),
            -1,
            dtype=torch.int32,
            pin_memory=pinned,
        )
        bits = masks.numpy().view(np.uint32)
        drafts: list[list[int]] = []
        for turn in turns:
            given = ids[turn.tokens]
            final = turn.lengths[0] - min(turn.row.known, turn.lengths[0])
            turn.row.advance(turn.lengths[0], given[:final])
            drafts.append(given[final:])
        self._fill(turns, drafts, masks)
        _finish(turns, bits, grammars.eos_id)
        return TokenMasks(places, masks)

    def _grammars(self) -> Grammars:
        assert self._loading is not None, "no row has a grammar"
        return self._loading.result()

    def _fill(self, turns: list[_Turn], drafts: list[list[int]], masks: Tensor) -> None:
        """Write the grammars' masks; those after a draft that is refused stay as they are."""
        from llguidance import LLExecutor

        if self._executor is None:
            self._executor = LLExecutor(self._threads)
        single: list[Any] = []
        several: list[Any] = []
        for turn, draft in zip(turns, drafts, strict=True):
            if turn.row.matcher is not None and not turn.row.off_grammar:
                if draft:
                    several.append((turn.row.matcher, turn.first, draft))
                else:
                    single.append((turn.row.matcher, turn.first))
        count, words = masks.shape
        if single:
            self._executor.unsafe_compute_mask_ptr(single, masks.data_ptr(), 4 * words, count)
        if several:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(
                several, masks.data_ptr(), 4 * words, count
            )


def _fetch(tokens: Tensor, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> _Fetch:
    """Start copying `counts` tokens of each of `rows` from `starts` on to the host."""
    total = int(counts.sum())
    if not total:
        return _Fetch(torch.empty(0, dtype=torch.int32), None)
    positions = np.arange(total) + np.repeat(starts - np.cumsum(counts) + counts, counts)
    if tokens.device.type == "cpu":
        return _Fetch(torch.from_numpy(tokens.numpy()[np.repeat(rows, counts), positions]), None)
    of, at = upload_integers([np.repeat(rows, counts), positions], tokens.device)
    ids = tokens[of, at].to("cpu", non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return _Fetch(ids, copied)


def _finish(turns: list[_Turn], bits: np.ndarray, eos_id: int) -> None:
    """Put a row's own ends in the place of the grammar's, in masks uint32 [k, words].

    A grammar's mask has the bit of `eos_id` where it may end. There a row's stop ids may come, unless fewer
    tokens than its minimum length came or it ignores EOS; where the grammar can only end they come anyway.
    """
    word, bit = eos_id // _WORD, np.uint32(1 << eos_id % _WORD)
    ending: np.ndarray = (bits[:, word] & bit) != 0
    followed = np.zeros(len(bits), bool)
    for turn in turns:
        turn.row.check()
        stop = turn.first + len(turn.lengths)
        if turn.row.failed is not None:
            # Nothing may come, and the request ends with an error.
            bits[turn.first : stop] = 0
        elif not turn.row.off_grammar:
            followed[turn.first : stop] = True
    bits[followed, word] &= ~bit
    goes_on = np.bitwise_or.reduce(bits, axis=1) != 0
    for turn in turns:
        row = turn.row
        for place, length in enumerate(turn.lengths, turn.first):
            if not followed[place]:
                continue
            too_short = length - row.num_prompt < row.min_tokens
            if ending[place] and (not goes_on[place] or (row.may_end and not too_short)):
                _set(bits[place], row.stops)
            elif too_short:
                _clear_unless_last(bits[place], row.stops)


def _set(mask: np.ndarray, ids: np.ndarray) -> None:
    np.bitwise_or.at(mask, ids // _WORD, np.uint32(1) << (ids % _WORD).astype(np.uint32))


def _clear_unless_last(mask: np.ndarray, ids: np.ndarray) -> None:
    """Ban `ids`, unless nothing else may come."""
    without = mask.copy()
    np.bitwise_and.at(without, ids // _WORD, ~(np.uint32(1) << (ids % _WORD).astype(np.uint32)))
    if without.any():
        mask[:] = without
