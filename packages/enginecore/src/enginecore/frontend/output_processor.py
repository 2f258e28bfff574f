"""From sampled ids to what a caller reads: text, stop strings, log probabilities, finish reasons."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from enginecore.frontend.text.detokenizer import IncrementalDetokenizer
from enginecore.frontend.text.prompts import Prompt
from enginecore.frontend.text.stop import StopMatcher
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.messages import FINISH_REASONS, RUNNING, STOP
from enginecore.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from enginecore.sampling_params import RequestOutputKind, SamplingParams


class SampleAssembler:
    """One sample of a request while it runs."""

    __slots__ = (
        "_detokenizer",
        "_matcher",
        "_pieces",
        "_push",
        "changed",
        "cumulative_logprob",
        "finish_reason",
        "index",
        "logprobs",
        "num_tokens",
        "request",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, request: "RequestAssembler", index: int, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.token_ids: list[int] = []
        """All tokens so far; with DELTA, those since the last output."""
        self.num_tokens = 0
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob = None if params.logprobs is None else 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.changed = False
        """Whether something is new since the last output."""
        self._pieces: list[str] = []
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, params.skip_special_tokens, request.prompt.token_ids
            )
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None
        # Text that nobody looks at before the end is made at the end, at once.
        unseen = params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop
        self._push = None if self._detokenizer is None or unseen else self._detokenizer.push

    def append(self, token: int, code: int) -> None:
        """Take one sampled token with the finish code that the core gave it."""
        self.token_ids.append(token)
        self.num_tokens += 1
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

    def end(self, reason: str, stop_reason: str | None = None) -> None:
        """End the sample without a further token."""
        self._end_text([] if self._push is not None else self.token_ids)
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.changed = True

    def output(self) -> CompletionOutput:
        """Return the sample so far, or with DELTA what is new, which then counts as seen."""
        text = "".join(self._pieces)
        token_ids, logprobs = self.token_ids, self.logprobs
        self.changed = False
        if self.request.params.output_kind is RequestOutputKind.DELTA:
            self._pieces, self.token_ids = [], []
            self.logprobs = None if logprobs is None else []
        elif self.finish_reason is None:
            self._pieces, token_ids = [text], token_ids.copy()
            logprobs = None if logprobs is None else logprobs.copy()
        return CompletionOutput(
            self.index,
            text,
            token_ids,
            self.cumulative_logprob,
            logprobs,
            self.finish_reason,
            self.stop_reason,
        )

    def _finish(self, token: int, code: int) -> None:
        params = self.request.params
        self.finish_reason = FINISH_REASONS[code]
        if code == STOP and (params.ignore_eos or token not in self.request.eos_ids):
            self.stop_reason = token
        untold = [token] if self._push is not None else self.token_ids
        hides_last = code == STOP and not params.include_stop_str_in_output
        self._end_text(untold[:-1] if hides_last else untold)

    def _end_text(self, ids: Sequence[int]) -> None:
        if self._detokenizer is not None:
            self._show(self._detokenizer.push(ids) + self._detokenizer.flush(), last=True)

    def _show(self, text: str, *, last: bool = False) -> None:
        if self._matcher is not None:
            armed = self.num_tokens > self.request.params.min_tokens
            text, stop = self._matcher.push(text, armed)
            if stop is not None:
                self.finish_reason, self.stop_reason = "stop", stop
            elif last:
                text += self._matcher.flush()
        self._pieces.append(text)


@dataclass(slots=True, eq=False)
class RequestAssembler:
    """A request while it runs."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    eos_ids: Collection[int]
    metrics: RequestMetrics
    samples: dict[int, SampleAssembler] = field(default_factory=dict)
    """By number, in the order of their index."""
    unfinished: int = 0
    num_cached_tokens: int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def has_output(self) -> bool:
        """Whether the caller wants to hear of the request as it is now."""
        return self.unfinished == 0 or self.params.output_kind is not RequestOutputKind.FINAL_ONLY

    def output(self) -> RequestOutput:
        """Return the request as its output kind wants it."""
        is_delta = self.params.output_kind is RequestOutputKind.DELTA
        samples = [sample for sample in self.samples.values() if sample.changed or not is_delta]
        prompt_logprobs = self.prompt_logprobs
        if is_delta:
            self.prompt_logprobs = None
        return RequestOutput(
            self.request_id,
            self.prompt.text,
            self.prompt.token_ids,
            [sample.output() for sample in samples],
            self.unfinished == 0,
            self.num_cached_tokens,
            prompt_logprobs,
            self.metrics,
        )
