"""An unfinished request in the front-end: its samples, their text, and what its caller has not seen yet."""

from array import array
from collections.abc import Collection, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginecore.frontend.pooling import PooledVector
from enginecore.frontend.request import Request
from enginecore.frontend.text.detokenizer import IncrementalDetokenizer
from enginecore.frontend.text.logprobs import LogprobRow
from enginecore.frontend.text.stop import StopMatcher
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.messages import FINISH_REASONS, RUNNING, STOP, AddRequest
from enginecore.outputs import CompletionOutput, RequestMetrics, RequestOutput
from enginecore.sampling_params import RequestOutputKind

_NOT_FINITE = (
    "the model's hidden states are NaN or infinite: its weights are damaged, or too large for its dtype"
)


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
        self.logprobs: list[LogprobRow] | None = [] if params.wants_logprobs else None
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

    def leave_request(self) -> None:
        """Let go of the request once the sample is of no step any more.

        Each holds the other, and with them their prompt: they would wait for the garbage collector.
        """
        del self.request

    def append(self, token: int, code: int) -> None:
        """Take one sampled token with the finish code that the core gave it."""
        self.token_ids.append(token)
        self.changed = True
        if code != RUNNING:
            self._finish(token, code)
        elif self._push is not None:
            self._show(self._push((token,)))

    def append_logprobs(self, row: LogprobRow) -> None:
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
