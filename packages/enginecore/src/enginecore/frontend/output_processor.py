"""The output processor: sampled ids to text, stop strings, log probabilities and finish reasons."""

import itertools
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginecore.frontend.pooling import PooledVector
from enginecore.frontend.request import Request
from enginecore.frontend.text.detokenizer import IncrementalDetokenizer
from enginecore.frontend.text.stop import StopMatcher
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.messages import (
    FINISH_REASONS,
    RUNNING,
    STOP,
    AddRequest,
    Outputs,
    PooledRows,
    PositionLogprobs,
)
from enginecore.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from enginecore.sampling_params import RequestOutputKind

_NOT_FINITE = (
    "the model's hidden states are NaN or infinite: its weights are damaged, or too large for its dtype"
)

LogprobRow = dict[int, Logprob]
"""Candidates at one position by token id: the actual token first, then the most likely ones."""


class SampleState:
    """One sample of a request while it runs."""

    __slots__ = (
        "_detokenizer",
        "_is_delta",
        "_matcher",
        "_params",
        "_pieces",
        "_push",
        "_shown",
        "changed",
        "cumulative_logprob",
        "finish_reason",
        "index",
        "logprobs",
        "message",
        "pooled",
        "request",
        "stop_reason",
        "token_ids",
        "was_scheduled",
    )

    def __init__(
        self, request: "RequestState", index: int, message: AddRequest, tokenizer: Tokenizer | None
    ) -> None:
        params = request.request.params
        self.request = request
        self._params = params
        self._is_delta = params.output_kind is RequestOutputKind.DELTA
        self.index = index
        self.message = message
        """The message that a core was sent for it, the last one if it was resumed."""
        self.was_scheduled = False
        """Whether its prompt has run on some core."""
        self.token_ids = array("i")
        """All tokens so far: four bytes each, to be resumed from."""
        self._shown = 0
        """Tokens that the last output held; only with DELTA."""
        self.logprobs: list[dict[int, Logprob]] | None = [] if params.wants_logprobs else None
        self.cumulative_logprob = 0.0 if params.wants_logprobs else None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.changed = False
        """Whether something is new since the last output."""
        plan = request.request.pooling
        self.pooled = None if plan is None else PooledVector(plan, len(message.prompt))
        self._pieces: list[str] = []
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                params.skip_special_tokens,
                request.request.prompt.token_ids,
                request.request.shown_tokens,
            )
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None
        # Text that nobody looks at before the end is made at the end, at once.
        unseen = params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop
        self._push = None if self._detokenizer is None or unseen else self._detokenizer.push

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def append(self, token: int, code: int) -> None:
        """Take one sampled token with the finish code that the core gave it."""
        self.token_ids.append(token)
        self.changed = True
        if code != RUNNING:
            self._finish(token, code)
        elif self._push is not None:
            self._show(self._push((token,)))

    def append_logprobs(self, row: dict[int, Logprob]) -> None:
        """Take the candidates at one position, the chosen token first."""
        if self.logprobs is not None and self.cumulative_logprob is not None:
            self.logprobs.append(row)
            self.cumulative_logprob += next(iter(row.values())).logprob

    def end_pooled(self, vector: PooledVector) -> None:
        """End the sample with a vector in the place of a token."""
        embedding = vector.result()
        if np.isfinite(embedding).all():
            self.request.embedding = embedding
            self.end("stop")
        else:
            self.end("error", _NOT_FINITE)

    def end(self, reason: str, stop_reason: str | None = None) -> None:
        """End the sample without a further token."""
        self._end_text([] if self._push is not None else self.token_ids)
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.changed = True

    def resumed(self, number: int, now: float, *, alone: bool) -> AddRequest:
        """Return the message that lets another core go on after the tokens so far."""
        sampling = self.message.sampling
        if self.index == 0:
            done = self.request.num_prompt_logprobs
            sampling = msgspec.structs.replace(sampling, prompt_logprobs_done=done)
        self.message = msgspec.structs.replace(
            self.message,
            number=number,
            sampling=sampling,
            generated=np.array(self.token_ids, np.int32),
            age=max(0.0, now - self.request.metrics.arrival_time),
            counted=self.was_scheduled,
            alone=alone,
        )
        return self.message

    def output(self) -> CompletionOutput:
        """Return the sample so far, or with DELTA what is new, which then counts as seen."""
        text = "".join(self._pieces)
        token_ids, logprobs = self.token_ids[self._shown :], self.logprobs
        self.changed = False
        if self._is_delta:
            self._pieces, self._shown = [], len(self.token_ids)
            self.logprobs = None if logprobs is None else []
        elif self.finish_reason is None:
            self._pieces = [text]
            logprobs = None if logprobs is None else logprobs.copy()
        return CompletionOutput(
            self.index,
            text,
            token_ids.tolist(),
            self.cumulative_logprob,
            logprobs,
            self.finish_reason,
            self.stop_reason,
        )

    def _finish(self, token: int, code: int) -> None:
        self.finish_reason = FINISH_REASONS[code]
        # A grammar that has come to its end gives EOS even where it is ignored.
        ignores_eos = self._params.ignore_eos and self._params.structured_outputs is None
        if code == STOP and (ignores_eos or token not in self.request.eos_ids):
            self.stop_reason = token
        untold = [token] if self._push is not None else self.token_ids
        hides_last = code == STOP and not self._params.include_stop_str_in_output
        self._end_text(untold[:-1] if hides_last else untold)

    def _end_text(self, ids: Sequence[int]) -> None:
        if self._detokenizer is not None:
            self._show(self._detokenizer.push(ids) + self._detokenizer.flush(), last=True)

    def _show(self, text: str, *, last: bool = False) -> None:
        if self._matcher is not None:
            armed = self.num_tokens > self._params.min_tokens
            text, stop = self._matcher.push(text, armed)
            if stop is not None:
                self.finish_reason, self.stop_reason = "stop", stop
            elif last:
                text += self._matcher.flush()
        self._pieces.append(text)


class RequestState:
    """An unfinished request: its samples, and what its caller has not seen yet.

    `output` may be called at any time: with DELTA it returns all that came since the last call, so a caller
    that reads slowly gets fewer and longer deltas.
    """

    __slots__ = (
        "_is_delta",
        "_is_final_only",
        "embedding",
        "eos_ids",
        "last_token_time",
        "metrics",
        "num_cached_tokens",
        "num_prompt_logprobs",
        "prompt_logprobs",
        "request",
        "samples",
        "unfinished",
    )

    def __init__(self, request: Request, eos_ids: Collection[int], arrival: float) -> None:
        """`arrival` is in seconds since the epoch."""
        self.request = request
        self._is_delta = request.params.output_kind is RequestOutputKind.DELTA
        self._is_final_only = request.params.output_kind is RequestOutputKind.FINAL_ONLY
        self.eos_ids = eos_ids
        self.metrics = RequestMetrics(arrival_time=arrival)
        self.last_token_time: float | None = None
        self.samples: list[SampleState] = []
        """By index."""
        self.unfinished = request.params.n
        """Samples that have not finished."""
        self.num_cached_tokens: int | None = None
        self.prompt_logprobs: list[LogprobRow | None] | None = (
            None if request.params.prompt_logprobs is None else [None]
        )
        self.num_prompt_logprobs = 0
        """Prompt positions whose log probabilities have come, whether the caller has taken them or not."""
        self.embedding: NDArray[np.float32] | None = None
        """[hidden], of a pooled request that has finished."""

    @property
    def finished(self) -> bool:
        return self.unfinished == 0

    @property
    def failure(self) -> str | None:
        """The error of a sample that could not be run; None if all could."""
        failed = (sample for sample in self.samples if sample.finish_reason == "error")
        return next((str(sample.stop_reason) for sample in failed), None)

    @property
    def has_output(self) -> bool:
        """Whether the caller wants to hear of the request as it is now.

        With prompt logprobs that is once they are complete, as another sample may be faster than the one
        that reports them.
        """
        if self.unfinished == 0 or self._is_final_only:
            return self.unfinished == 0
        known = self.prompt_logprobs
        return known is None or len(known) == len(self.request.prompt.token_ids)

    def output(self) -> RequestOutput:
        """Return the request as its output kind wants it."""
        samples, prompt_logprobs = self.samples, self.prompt_logprobs
        if self._is_delta:
            samples = [sample for sample in samples if sample.changed]
            self.prompt_logprobs = None
        return RequestOutput(
            self.request.request_id,
            self.request.prompt.text,
            self.request.prompt.token_ids,
            [sample.output() for sample in samples],
            self.finished,
            self.num_cached_tokens,
            prompt_logprobs,
            self.metrics,
            self.embedding,
        )


class Processed(NamedTuple):
    """Effects of one step's outputs."""

    changed: list[RequestState]
    """Requests that got a token or ended."""
    scheduled: list[RequestState]
    """Requests whose first sample has begun to run."""
    stopped: list[int]
    """Numbers whose sample ended in a stop string, which the core does not know: it must drop them."""
    prompt_tokens: int
    """Of samples that have begun to run."""
    generated_tokens: int


class OutputProcessor:
    """Holds a front-end's unfinished requests and turns each step's outputs into what callers get."""

    def __init__(self, tokenizer: Tokenizer | None, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since the epoch."""
        self._tokenizer = tokenizer
        self._clock = clock
        self._unused_numbers = itertools.count()
        self._requests: dict[str, RequestState] = {}
        self._samples: dict[int, SampleState] = {}

    def __len__(self) -> int:
        """Unfinished requests."""
        return len(self._requests)

    def __contains__(self, request_id: object) -> bool:
        """Whether an unfinished request has this id."""
        return request_id in self._requests

    @property
    def requests(self) -> Mapping[str, RequestState]:
        """The unfinished requests by id."""
        return self._requests

    def new_number(self) -> int:
        """Return a number for a message to a core that no other has had."""
        return next(self._unused_numbers)

    def add(self, request: Request, eos_ids: Collection[int], messages: Sequence[AddRequest]) -> RequestState:
        """Take a request, whose id no unfinished one has, with the message of each of its samples."""
        state = RequestState(request, eos_ids, self._clock())
        for index, message in enumerate(messages):
            sample = SampleState(state, index, message, self._tokenizer)
            state.samples.append(sample)
            self._samples[message.number] = sample
        self._requests[request.request_id] = state
        return state

    def resume(self, numbers: Iterable[int], alone: Collection[int]) -> dict[int, AddRequest]:
        """See `Frontend.resume`."""
        now = self._clock()
        known = [number for number in numbers if number in self._samples]
        known.sort(key=lambda number: self._samples[number].request.metrics.arrival_time)
        messages = {}
        for number in known:
            sample = self._samples.pop(number)
            messages[number] = sample.resumed(self.new_number(), now, alone=number in alone)
            self._samples[sample.message.number] = sample
        return messages

    def process(self, outputs: Outputs) -> Processed:
        """Take one step's outputs; numbers that are not known are passed over: they were aborted."""
        prompt_tokens = generated_tokens = 0
        scheduled: list[RequestState] = []
        for number, (num_cached, waited) in outputs.scheduled.items():
            sample = self._samples.get(number)
            if sample is None or sample.was_scheduled:
                continue
            if not any(other.was_scheduled for other in sample.request.samples):
                scheduled.append(sample.request)
            sample.was_scheduled = True
            prompt_tokens += len(sample.message.prompt)
            if sample.index == 0:
                sample.request.num_cached_tokens = num_cached
                sample.request.metrics.time_in_queue = waited
        for number, (drafted, accepted) in outputs.drafted.items():
            sample = self._samples.get(number)
            if sample is not None:
                sample.request.metrics.num_draft_tokens += drafted
                sample.request.metrics.num_accepted_tokens += accepted
        for number, entry in outputs.prompt_logprobs:
            self._add_prompt_logprobs(number, entry)
        if outputs.pooled is not None:
            self._add_pooled(outputs.pooled)
        logprobs = self._rows_by_number(outputs.logprobs)
        changed: dict[RequestState, None] = {}
        stopped: list[int] = []
        columns = outputs.numbers.tolist(), outputs.tokens.tolist(), outputs.finished.tolist()
        for number, token, code in zip(*columns, strict=True):
            sample = self._samples.get(number)
            if sample is None:
                continue  # aborted, or past its stop string
            if number in logprobs:
                sample.append_logprobs(logprobs[number].pop(0))
            if sample.pooled is not None:
                sample.end_pooled(sample.pooled)
            else:
                sample.append(token, code)
                generated_tokens += 1
            changed[sample.request] = None
            if sample.finish_reason is not None:
                self._finish(number)
                if code == RUNNING:
                    stopped.append(number)
        self._note_first_tokens(changed)
        for number, message in outputs.errors.items():
            sample = self._samples.get(number)
            if sample is not None:
                sample.end("error", message)
                changed[sample.request] = None
                self._finish(number)
        return Processed(list(changed), scheduled, stopped, prompt_tokens, generated_tokens)

    def abort(self, request_id: str) -> list[int]:
        """Forget a request; return the numbers that a core must drop: none when it is unknown or finished."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return []
        numbers = [sample.message.number for sample in state.samples]
        return [number for number in numbers if self._samples.pop(number, None) is not None]

    def _finish(self, number: int) -> None:
        state = self._samples.pop(number).request
        state.unfinished -= 1
        if state.finished:
            state.metrics.finished_time = self._clock()
            del self._requests[state.request.request_id]

    def _note_first_tokens(self, changed: Mapping[RequestState, None]) -> None:
        for state in changed:
            if state.metrics.first_token_time is None:
                state.metrics.first_token_time = self._clock()

    def _add_prompt_logprobs(self, number: int, entry: PositionLogprobs) -> None:
        sample = self._samples.get(number)
        if sample is not None and sample.request.prompt_logprobs is not None:
            sample.request.prompt_logprobs += self._rows(entry, sample)
            sample.request.num_prompt_logprobs += len(entry.ranks)

    def _add_pooled(self, pooled: PooledRows) -> None:
        columns = pooled.rows.tolist(), pooled.starts.tolist(), pooled.counts.tolist()
        for number, start, count, part in zip(*columns, pooled.vectors, strict=True):
            sample = self._samples.get(number)
            if sample is not None and sample.pooled is not None:
                sample.pooled.add(start, count, part)

    def _rows_by_number(self, entries: Sequence[tuple[int, PositionLogprobs]]) -> dict[int, list[LogprobRow]]:
        found: dict[int, list[LogprobRow]] = {}
        for number, entry in entries:
            sample = self._samples.get(number)
            if sample is not None:
                by_rank = sample.request.request.params.logprob_token_ids is None
                found.setdefault(number, []).extend(self._rows(entry, sample, by_rank=by_rank))
        return found

    def _rows(
        self, entry: PositionLogprobs, sample: SampleState, *, by_rank: bool = True
    ) -> list[LogprobRow]:
        tokenizer = self._tokenizer if sample.request.request.params.detokenize else None
        return logprob_rows(entry, tokenizer, by_rank=by_rank)


def logprob_rows(
    entry: PositionLogprobs, tokenizer: Tokenizer | None, *, by_rank: bool = True
) -> list[LogprobRow]:
    """Return one dict a position: the actual token first, then the others, which are the likeliest `by_rank`.

    An actual token that is among the others stands once. `decoded_token` is the token's text as it stands in
    a text, or None without a tokenizer.
    """
    rows = []
    for tokens, logprobs, rank in zip(entry.ids.tolist(), entry.values.tolist(), entry.ranks.tolist()):
        row: LogprobRow = {}
        for place, (token, logprob) in enumerate(zip(tokens, logprobs)):
            if token not in row:
                text = None if tokenizer is None else tokenizer.token_text(token)
                row[token] = Logprob(logprob, (place if by_rank else None) if place else rank, text)
        rows.append(row)
    return rows
