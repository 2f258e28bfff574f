"""Beam search over plain requests: each round runs every open beam for one token, with log probabilities.

Beams of a prompt share what they have in common through the prefix cache.
"""

import asyncio
import time
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from enginecore.errors import ContextLengthError, RequestAbortedError, RequestError
from enginecore.frontend.request import Prompt
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.metrics import Ended, Metrics
from enginecore.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from enginecore.sampling_params import RequestOutputKind, SamplingParams

MAX_BEAM_WIDTH = 128
"""Most beams of one prompt."""


class BeamSearchParams(msgspec.Struct):
    """Options of a beam search, in vLLM's order. Validated on construction.

    Raises:
        ValueError: a field is out of range; the message names it.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Above 0, each beam also offers a token drawn at it, should that be none of the likeliest."""
    length_penalty: float = 1.0
    """Beams are compared by their log probability divided by their length (with the prompt, without the EOS
    that ended one) to this power: above 0 longer ones gain."""
    include_stop_str_in_output: bool = False
    """Whether the tokens of a finished beam include the EOS that ended it."""

    def __post_init__(self) -> None:
        for name, most in (("beam_width", MAX_BEAM_WIDTH), ("max_tokens", None)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be an integer, got {value!r:.80}")
            if value < 1 or (most is not None and value > most):
                limits = "at least 1" if most is None else f"between 1 and {most}"
                raise ValueError(f"{name} must be {limits}, got {value}")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r:.80}")
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not -100 <= penalty <= 100:
            raise ValueError(f"length_penalty must be a number between -100 and 100, got {penalty!r:.80}")
        self.step_params()

    def step_params(self) -> SamplingParams:
        """Return the parameters with which a beam is run for one token."""
        return SamplingParams(
            max_tokens=1,
            temperature=self.temperature,
            logprobs=2 * self.beam_width,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam."""

    tokens: list[int]
    """The prompt's, then those that were found."""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """The candidates at each position that was run, the EOS's included."""
    cum_logprob: float = 0.0
    """Sum of the log probabilities of the tokens found, the EOS's included."""
    text: str | None = None
    """Of all tokens, special ones written out; None without a tokenizer."""
    finish_reason: str | None = None
    """None while it is open, then "stop" or "length"."""
    stop_reason: int | str | None = None
    """The EOS that ended it."""


@dataclass(slots=True)
class BeamSearchOutput:
    """A prompt's beams, the best first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """The search for one prompt.

    Run `prompts` with `params.step_params()` and call `advance`, until `prompts` is empty; then take `best`.

    Each open beam offers its 2 × beam_width likeliest next tokens. An EOS among them completes a beam; of all
    others the beam_width likeliest beams stay open.

    Raises:
        RequestError: the prompt leaves no room for a token, or the width needs more than `max_logprobs`
            log probabilities (-1: no limit).
    """

    def __init__(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        eos_ids: Collection[int],
        *,
        max_model_len: int,
        max_logprobs: int,
    ) -> None:
        room = max_model_len - len(prompt.token_ids)
        if room <= 0:
            used = f"its {len(prompt.token_ids)} tokens leave no room for output"
            raise ContextLengthError(max_model_len, used)
        check_width(params.beam_width, max_logprobs)
        self._prompt = prompt
        self._params = params
        self._eos_ids = frozenset() if params.ignore_eos else frozenset(eos_ids)
        self._rounds = min(params.max_tokens, room)
        self._open = [BeamSearchSequence(prompt.token_ids)]
        self._completed: list[tuple[float, BeamSearchSequence]] = []
        """Score and beam."""
        self._num_cached: int | None = None
        """Tokens of the prompt that were found in the prefix cache."""
        self._times = RequestMetrics(arrival_time=time.time())
        self._token_times: list[float] = []
        """End of each round, in seconds since the epoch."""

    @property
    def prompts(self) -> list[Prompt]:
        """Prompts to run next; empty when the search has ended."""
        if not self._rounds:
            return []
        return [Prompt(None, beam.tokens, self._prompt.cache_salt) for beam in self._open]

    def advance(self, outputs: Sequence[RequestOutput]) -> None:
        """Take the final output of each of `prompts`, in order.

        Raises:
            RequestError: one of them failed.
        """
        self._rounds -= 1
        self._token_times.append(time.time())
        if self._num_cached is None:
            self._num_cached = outputs[0].num_cached_tokens
            self._times.first_token_time = self._token_times[0]
            if outputs[0].metrics is not None:
                self._times.time_in_queue = outputs[0].metrics.time_in_queue
        found: list[BeamSearchSequence] = []
        for beam, output in zip(self._open, outputs, strict=True):
            found += self._continued(beam, _candidates(output))
        found.sort(key=lambda beam: -beam.cum_logprob)
        self._open = found[: self._params.beam_width]
        if not self._rounds:
            for beam in self._open:
                beam.finish_reason = "length"
                self._complete(beam, len(beam.tokens))

    def best(self) -> list[BeamSearchSequence]:
        """Return the beams found, the best first: beam_width of them, or as many as there are."""
        ordered = sorted(self._completed, key=lambda entry: -entry[0])
        return [beam for _, beam in ordered[: self._params.beam_width]]

    @staticmethod
    @contextmanager
    def counting(begun: Collection["BeamSearch"], metrics: Metrics) -> Generator[None]:
        """Count as aborted or failed those of `begun` that do not come to their end."""
        try:
            yield
        except BaseException as error:
            aborted = isinstance(error, asyncio.CancelledError | RequestAbortedError | KeyboardInterrupt)
            for search in begun:
                search.count(metrics, "abort" if aborted else "error")
            raise

    def count(self, metrics: Metrics, reason: str | None = None) -> None:
        """Count the search, which has ended, as one request; `reason` is told where it did not finish."""
        found = self._open if reason else self.best()
        finish = reason or ("stop" if all(beam.finish_reason == "stop" for beam in found) else "length")
        start, params = len(self._prompt.token_ids), self._params
        ended = Ended(
            start,
            [len(beam.tokens) - start for beam in found],
            params.beam_width,
            params.max_tokens,
            self._times,
        )
        metrics.searched(ended, self._token_times, finish)

    def request_output(
        self, request_id: str, tokenizer: Tokenizer | None, skip_special_tokens: bool
    ) -> RequestOutput:
        """Return the best beams as the samples of one finished request: what follows the prompt in each."""
        start = len(self._prompt.token_ids)
        samples = []
        for index, beam in enumerate(self.best()):
            ids = beam.tokens[start:]
            # The EOS that ended a beam is among its tokens or not, and in no case part of its text.
            shown = ids[:-1] if ids and ids[-1] == beam.stop_reason else ids
            text = "" if tokenizer is None else tokenizer.decode(shown, skip_special_tokens)
            samples.append(
                CompletionOutput(
                    index,
                    text,
                    ids,
                    beam.cum_logprob,
                    beam.logprobs,
                    beam.finish_reason,
                    beam.stop_reason,
                )
            )
        prompt = self._prompt
        return RequestOutput(
            request_id,
            prompt.text,
            prompt.token_ids,
            samples,
            True,
            self._num_cached,
            metrics=self._times,
        )

    def _continued(
        self, beam: BeamSearchSequence, candidates: Mapping[int, Logprob]
    ) -> Iterable[BeamSearchSequence]:
        """Return `beam` with each of the candidates; what an EOS completes is kept aside."""
        logprobs = [*beam.logprobs, dict(candidates)]
        for token, candidate in candidates.items():
            total = beam.cum_logprob + candidate.logprob
            if token not in self._eos_ids:
                yield BeamSearchSequence([*beam.tokens, token], logprobs, total)
                continue
            shown = [token] if self._params.include_stop_str_in_output else []
            ended = BeamSearchSequence(
                beam.tokens + shown, logprobs, total, finish_reason="stop", stop_reason=token
            )
            self._complete(ended, len(beam.tokens))

    def _complete(self, beam: BeamSearchSequence, length: int) -> None:
        self._completed.append((beam.cum_logprob / length**self._params.length_penalty, beam))


def check_width(beam_width: int, max_logprobs: int) -> None:
    """Raise RequestError where a width needs more log probabilities than a request may ask for."""
    if max_logprobs != -1 and 2 * beam_width > max_logprobs:
        raise RequestError(
            f"beam_width={beam_width} needs {2 * beam_width} log probabilities a token, and max_logprobs is "
            f"{max_logprobs}: beams may be up to {max_logprobs // 2}, or the option max_logprobs larger",
            "beam_width",
        )


def decode_beams(beams: Iterable[BeamSearchSequence], tokenizer: Tokenizer | None) -> None:
    """Set the text of beams."""
    if tokenizer is not None:
        for beam in beams:
            beam.text = tokenizer.decode(beam.tokens, skip_special_tokens=False)


def _candidates(output: RequestOutput) -> dict[int, Logprob]:
    (sample,) = output.outputs
    if sample.finish_reason == "error" or not sample.logprobs:
        raise RequestError(f"a beam could not be run: {sample.stop_reason}")
    return sample.logprobs[0]
