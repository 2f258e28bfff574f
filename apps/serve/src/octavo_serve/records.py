"""Facts of a request that generates, for its line in the log and its span."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from enginecore import RequestOutput, RequestStream, SamplingParams
from enginecore.frontend.openai import Head

CLIENT_LEFT = 499
"""Logged and counted where a client went away before its answer began, as nginx does."""


class Times(NamedTuple):
    """Course of a request in the engine, in seconds since the epoch; of several prompts, all together."""

    arrival: float
    scheduled: float | None
    """When the first prompt began to run."""
    first_token: float | None
    finished: float | None
    """When the last prompt had finished; None while one has not."""


class RequestRecord:
    """Facts of one request that generates: no text of prompt or answer is among them."""

    def __init__(self) -> None:
        self.id: str | None = None
        """The answer's; None for a request that did not come to generating."""
        self.model: str | None = None
        """One of the served names."""
        self.params: SamplingParams | None = None
        """None for a beam search and for embeddings."""
        self.samples = 1
        """Samples of each prompt."""
        self.streams = False
        self.failure: str | None = None
        """What ended an answer that had begun: the status of an error, or "aborted"."""
        self.generated = 0
        """Tokens so far."""
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._reasons: dict[tuple[int, int], str] = {}
        self._first: RequestStream | None = None
        self._last: RequestStream | None = None

    def begin(
        self,
        head: Head,
        prompt_tokens: Sequence[int],
        samples: int = 1,
        params: SamplingParams | None = None,
        *,
        streams: bool = False,
    ) -> None:
        """Take note of a request for `samples` of each prompt."""
        self.id, self.model = head.id, head.model
        self.params, self.samples, self.streams = params, samples, streams
        self._prompts = dict(enumerate(prompt_tokens))

    def follow(self, stream: RequestStream) -> None:
        """Take note of a stream of its outputs; a beam search has several, one after another."""
        self._first = self._first or stream
        self._last = stream

    def add(self, prompt: int, output: RequestOutput) -> None:
        """Take note of an output of prompt number `prompt`, which holds what is new since the last one."""
        if output.num_cached_tokens:
            self._cached[prompt] = output.num_cached_tokens
        for sample in output.outputs:
            self.generated += len(sample.token_ids)
            if sample.finish_reason is not None:
                self._reasons[prompt, sample.index] = sample.finish_reason

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self._prompts.values())

    @property
    def cached_tokens(self) -> int:
        """Those of them that were cached."""
        return sum(self._cached.values())

    @property
    def unfinished(self) -> int:
        """Samples that have not finished."""
        return self.samples * len(self._prompts) - len(self._reasons)

    @property
    def finish_reasons(self) -> list[str]:
        """Reasons of the samples that have finished, in the order of the answer's choices."""
        return [self._reasons[sample] for sample in sorted(self._reasons)]

    def times(self) -> Times | None:
        """Return how far the request came in the engine and when; None if it did not come there."""
        if self._first is None or self._last is None:
            return None
        first, last = self._first.metrics, self._last.metrics
        scheduled = [
            each.arrival_time + each.time_in_queue for each in first if each.time_in_queue is not None
        ]
        tokens = [each.first_token_time for each in first if each.first_token_time is not None]
        finished = [each.finished_time for each in last if each.finished_time is not None]
        return Times(
            min(each.arrival_time for each in first),
            min(scheduled, default=None),
            min(tokens, default=None),
            max(finished) if len(finished) == len(last) else None,
        )

    def fields(self) -> dict[str, Any]:
        """Return what the log tells, by name; nothing for a request that did not come to generating."""
        if self.id is None:
            return {}
        reasons = [*self._reasons.values(), *(["abort"] if self.unfinished else [])]
        found: dict[str, Any] = {
            "id": self.id,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.generated,
            "cached_tokens": self.cached_tokens,
        }
        times = self.times()
        if times is not None and times.first_token is not None:
            found["ttft"] = times.first_token - times.arrival
        return {**found, "finish": ",".join(dict.fromkeys(reasons))}


class Answered(NamedTuple):
    """A request that has been answered, or whose client has left."""

    method: str
    path: str
    """As the client gave it."""
    route: str
    status: int
    key: str | None
    """Name of its key."""
    record: RequestRecord
    seconds: float
    """From its arrival to its end."""
