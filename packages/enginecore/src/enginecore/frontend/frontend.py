"""What stands between callers and engine cores: checks requests, turns text into ids and ids into text.

It does no input or output: the same front-end serves an engine in this process and one behind sockets.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from enginecore.config import EngineConfig
from enginecore.errors import ConfigError, RequestError
from enginecore.frontend.output_processor import RequestAssembler, SampleAssembler
from enginecore.frontend.text.chat import NO_TEMPLATE, ChatTemplate, read_template
from enginecore.frontend.text.logprobs import logprob_rows
from enginecore.frontend.text.prompts import Prompt, encode_text, read_prompt
from enginecore.frontend.text.tokenizer import NO_TOKENIZER, Tokenizer
from enginecore.frontend.validation import (
    bad_word_ids,
    check_choice,
    check_params,
    check_prompt,
    output_limit,
)
from enginecore.messages import RUNNING, AddRequest, Outputs, Ready, TokenLogprobs, tokens_to_bytes
from enginecore.model_files import ModelFiles, eos_token_ids, sampling_defaults
from enginecore.outputs import Logprob, RequestMetrics, RequestOutput
from enginecore.sampling_params import SamplingParams

__all__ = ["Frontend", "Prompt", "Received", "Usage"]


class Usage(NamedTuple):
    """What a finished request took."""

    request_id: str
    prompt_tokens: int
    completion_tokens: int
    """Of all samples, EOS and stop tokens included."""
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""


class Received(NamedTuple):
    """What one step's tokens meant for the callers."""

    outputs: list[RequestOutput]
    abort: list[int]
    """Numbers whose sample ended in a stop string, which the core does not know: it must drop them."""
    usages: list[Usage]
    """Of the requests that finished."""


class Frontend:
    """Holds one engine's unfinished requests.

    Args:
        config: The engine's options.
        files: The model's files.
        tokenizer: Its tokenizer; without one, only token ids go in and come out.
        clock: Gives seconds since the epoch.

    Raises:
        ConfigError: the option chat_template names no template that parses.
    """

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        tokenizer: Tokenizer | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.tokenizer = tokenizer
        self.limits: Ready | None = None
        """The engine's limits, to be set once its core is ready; no request is taken before."""
        self.sampling_defaults = sampling_defaults(files)
        """What the model recommends for parameters that a request leaves open."""
        self._config = config
        self._clock = clock
        self._eos_ids = eos_token_ids(files) or _eos_of(tokenizer)
        self._numbers = itertools.count()
        self._unseeded = itertools.count(config.seed)
        self._requests: dict[str, RequestAssembler] = {}
        self._samples: dict[int, SampleAssembler] = {}
        self._own_template: ChatTemplate | None = None
        if config.chat_template is not None:
            self._own_template = ChatTemplate(read_template(config.chat_template), tokenizer)

    @property
    def unfinished(self) -> int:
        """Requests added and neither finished nor aborted."""
        return len(self._requests)

    def prepare_prompt(self, prompt: Any, add_special_tokens: bool = True) -> Prompt:
        """Return a prompt as token ids.

        Args:
            prompt: Text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`, the latter two with a
                `cache_salt` or without; or a `Prompt`, which is returned as it is.
            add_special_tokens: Put around text what the tokenizer puts there, such as BOS.

        Raises:
            RequestError: it is none of these, or it is text and the model has no tokenizer.
        """
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(text, str):
            self._check_length(text)
        return read_prompt(prompt, self.tokenizer, add_special_tokens)

    def prepare_chat(
        self, messages: Sequence[Mapping[str, Any]], /, *, chat_template: str | None = None, **options: Any
    ) -> Prompt:
        """Return a conversation as one prompt, which holds just the special tokens that the template writes.

        Args:
            messages: Mappings with "role" and "content".
            chat_template: A Jinja template to use in place of the model's. It runs in a sandbox, but may
                still take long: let only trusted callers give one.
            options: Keyword arguments of `ChatTemplate.render`.

        Raises:
            RequestError: there is no template or tokenizer, or the template refuses the messages.
        """
        text = self._template(chat_template).render(messages, **options)
        self._check_length(text)
        ids = encode_text(text, self.tokenizer, add_special_tokens=False)
        if not ids:
            raise RequestError(
                "the messages make an empty prompt: it must hold at least one token", "messages"
            )
        return Prompt(text, ids)

    def add(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[AddRequest]:
        """Take a request; return what to send to a core: a message for each of its `params.n` samples.

        Raises:
            RequestError: it cannot be run as asked; nothing has changed then.
        """
        if self.limits is None:
            raise RequestError("the engine is not ready: its model is still loading")
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} belongs to an unfinished request", "request_id")
        if priority and self._config.scheduling_policy != "priority":
            policy = self._config.scheduling_policy
            raise RequestError(f"priority has no effect with scheduling_policy {policy!r}", "priority")
        check_prompt(prompt.token_ids, self.limits)
        max_tokens = output_limit(len(prompt.token_ids), params, self.limits)
        check_params(params, self.limits, max_logprobs=self._config.max_logprobs, tokenizer=self.tokenizer)
        bad_words = self._bad_words(params)
        stop_ids = [] if params.ignore_eos else [i for i in self._eos_ids if i < self.limits.vocab_size]
        stop_ids = list(dict.fromkeys(stop_ids + params.stop_token_ids))
        check_choice(params, stop_ids, bad_words, self.limits.vocab_size)
        request = self._start(request_id, prompt, params)
        return [
            AddRequest(
                number=number,
                prompt=tokens_to_bytes(prompt.token_ids),
                params=params if sample.index == 0 else _without_prompt_logprobs(params),
                stop_ids=stop_ids,
                max_tokens=max_tokens,
                seed=self._seed(params, sample.index),
                cache_salt=prompt.cache_salt if cache_salt is None else cache_salt,
                priority=priority,
                bad_words=bad_words,
            )
            for number, sample in request.samples.items()
        ]

    def receive(self, outputs: Outputs) -> Received:
        """Take one step's tokens; return what callers get to see of it."""
        for number, (num_cached, _) in outputs.scheduled.items():
            self._note_first_token(number, num_cached)
        for entry in outputs.prompt_logprobs:
            self._note_prompt_logprobs(entry)
        rows = self._rows_by_number(outputs.logprobs) if outputs.logprobs else {}
        samples, abort = self._samples, []
        changed: dict[RequestAssembler, None] = {}
        numbers, tokens, codes = outputs.columns()
        for number, token, code in zip(numbers.tolist(), tokens.tolist(), codes.tolist()):
            sample = samples.get(number)
            if sample is None:
                continue  # aborted, or past its stop string
            if number in rows:
                sample.append_logprobs(rows[number].pop(0))
            sample.append(token, code)
            changed[sample.request] = None
            if sample.finish_reason is not None:
                self._close(number)
                if code == RUNNING:
                    abort.append(number)
        for number, message in outputs.errors.items():
            if number in samples:
                samples[number].end("error", message)
                changed[samples[number].request] = None
                self._close(number)
        usages = [_usage(request) for request in changed if request.unfinished == 0]
        return Received([request.output() for request in changed if request.has_output], abort, usages)

    def abort(self, request_id: str) -> list[int]:
        """Forget a request; return the numbers that a core must drop: none when it is unknown or finished."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return []
        return [number for number in request.samples if self._samples.pop(number, None) is not None]

    def fail_all(self, message: str) -> list[RequestOutput]:
        """End every request with an error and forget it; return their last outputs."""
        failed = list(self._requests.values())
        for number in list(self._samples):
            self._samples[number].end("error", message)
            self._close(number)
        return [request.output() for request in failed]

    def _check_length(self, text: str) -> None:
        """Refuse a text that cannot fit before anybody's time is spent on cutting it into tokens."""
        if self.limits is None or self.tokenizer is None:
            return
        if len(text) > self.limits.max_model_len * self.tokenizer.longest_token:
            raise RequestError(
                f"the prompt has {len(text)} characters, more than prompt and output together can hold in "
                f"{self.limits.max_model_len} tokens",
                "prompt",
            )

    def _template(self, given: str | None) -> ChatTemplate:
        try:
            if given is not None:
                return _compiled(given, self.tokenizer)
            if self._own_template is None:
                source = None if self.tokenizer is None else self.tokenizer.chat_template
                if source is None:
                    raise RequestError(NO_TEMPLATE if self.tokenizer is not None else NO_TOKENIZER)
                self._own_template = ChatTemplate(source, self.tokenizer)
        except ConfigError as error:
            raise RequestError(str(error), "chat_template") from error
        return self._own_template

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        if self.tokenizer is None:
            return []
        return [ids for word in params.bad_words for ids in bad_word_ids(word, self.tokenizer)]

    def _seed(self, params: SamplingParams, index: int) -> int:
        if params.seed is None:
            return next(self._unseeded)
        return (params.seed + index + 2**63) % 2**64 - 2**63  # stays a 64-bit integer

    def _start(self, request_id: str, prompt: Prompt, params: SamplingParams) -> RequestAssembler:
        request = RequestAssembler(
            request_id,
            prompt,
            params,
            self._eos_ids,
            RequestMetrics(arrival_time=self._clock()),
            unfinished=params.n,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        for index in range(params.n):
            request.samples[next(self._numbers)] = SampleAssembler(request, index, self.tokenizer)
        self._samples |= request.samples
        self._requests[request_id] = request
        return request

    def _close(self, number: int) -> None:
        request = self._samples.pop(number).request
        request.unfinished -= 1
        if request.unfinished == 0:
            request.metrics.finished_time = self._clock()
            del self._requests[request.request_id]

    def _note_first_token(self, number: int, num_cached: int) -> None:
        sample = self._samples.get(number)
        if sample is not None:
            request = sample.request
            if sample.index == 0:
                request.num_cached_tokens = num_cached
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = self._clock()

    def _note_prompt_logprobs(self, entry: TokenLogprobs) -> None:
        sample = self._samples.get(entry.number)
        if sample is not None and sample.request.prompt_logprobs is not None:
            sample.request.prompt_logprobs += self._rows(entry, sample)

    def _rows_by_number(self, entries: list[TokenLogprobs]) -> dict[int, list[dict[int, Logprob]]]:
        found: dict[int, list[dict[int, Logprob]]] = {}
        for entry in entries:
            sample = self._samples.get(entry.number)
            if sample is not None:
                found.setdefault(entry.number, []).extend(self._rows(entry, sample))
        return found

    def _rows(self, entry: TokenLogprobs, sample: SampleAssembler) -> list[dict[int, Logprob]]:
        return logprob_rows(entry, self.tokenizer if sample.request.params.detokenize else None)


@lru_cache(maxsize=16)
def _compiled(source: str, tokenizer: Tokenizer | None) -> ChatTemplate:
    return ChatTemplate(source, tokenizer)


def _eos_of(tokenizer: Tokenizer | None) -> list[int]:
    eos = None if tokenizer is None else tokenizer.eos_token_id
    return [] if eos is None else [eos]


def _without_prompt_logprobs(params: SamplingParams) -> SamplingParams:
    """A prompt is the same for every sample: one of them reports on it."""
    if params.prompt_logprobs is None:
        return params
    return msgspec.structs.replace(params, prompt_logprobs=None)


def _usage(request: RequestAssembler) -> Usage:
    return Usage(
        request.request_id,
        len(request.prompt.token_ids),
        sum(sample.num_tokens for sample in request.samples.values()),
        request.num_cached_tokens or 0,
    )
