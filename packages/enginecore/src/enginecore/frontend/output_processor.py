"""The output processor: each step's outputs to what callers get, and to what cores must be told."""

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from enginecore.frontend.request import Request
from enginecore.frontend.request_state import RequestState, SampleState
from enginecore.frontend.text.logprobs import LogprobRow, logprob_rows
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.messages import RUNNING, AddRequest, Outputs, PooledRows, PositionLogprobs


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
        samples = [self._samples.pop(sample.message.number, None) for sample in state.samples]
        dropped = [sample for sample in samples if sample is not None]
        for sample in dropped:
            sample.leave_request()
        return [sample.message.number for sample in dropped]

    def _finish(self, number: int) -> None:
        sample = self._samples.pop(number)
        state = sample.request
        sample.leave_request()
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
