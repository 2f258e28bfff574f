"""A front-end: checks requests and turns text into ids for an engine core, and its outputs into text.

It does no input or output: the same front-end serves an engine in this process and one behind sockets.
"""

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from enginecore.config import POLICIES, EngineConfig
from enginecore.errors import ConfigError, ContextLengthError, RequestError
from enginecore.frontend.guides import FIELD as GUIDE_FIELD
from enginecore.frontend.guides import GuideReader
from enginecore.frontend.output_processor import OutputProcessor, Processed
from enginecore.frontend.parsing import Thinking, load_parsers
from enginecore.frontend.pooling import Pooler, PoolingPlan
from enginecore.frontend.request import Prompt, Request
from enginecore.frontend.request_state import RequestState
from enginecore.frontend.text.chat import NO_TEMPLATE, ChatTemplate, read_template
from enginecore.frontend.text.detokenizer import IncrementalDetokenizer
from enginecore.frontend.text.hf_tokenizer import HFTokenizer
from enginecore.frontend.text.prompts import encode_text, read_prompt, truncated
from enginecore.frontend.text.tokenizer import NO_TOKENIZER, Tokenizer
from enginecore.frontend.validation import (
    bad_word_ids,
    check_choice,
    check_fits,
    check_params,
    check_prompt,
    check_salt,
    output_limit,
)
from enginecore.grammars import Grammars, all_eos_ids
from enginecore.logits_processors import check_request, load_classes
from enginecore.messages import AddRequest, EngineLimits, Guide, Outputs, RowSampling
from enginecore.model_files import ModelFiles, sampling_defaults
from enginecore.pooling_params import PoolingParams
from enginecore.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_SEED_BITS = 40
"""Each front-end has 2**40 seeds before it comes to those of the next."""
_LOADING = "the engine is not ready: its model is still loading"
_PIECE = 4096
"""Token ids to turn into text at once."""


class Added(NamedTuple):
    """A request that was taken."""

    state: RequestState
    messages: list[AddRequest]
    """To be sent to a core: one for each sample."""


class Frontend:
    """Holds one engine's unfinished requests.

    Args:
        config: The engine's options.
        files: The model's files.
        tokenizer: Its tokenizer; without one, only token ids go in and come out.
        clock: Gives seconds since the epoch.
        number: Its own among the front-ends of the engine: they draw from seeds far apart.
        takes_callables: Whether requests may bring logits processors: the engine's worker is in this process.

    Raises:
        ConfigError: the option chat_template names no template that parses, pooler_config is wrong, an option
            names no parser, or a logits processor cannot be had.
    """

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        tokenizer: Tokenizer | None,
        clock: Callable[[], float] = time.time,
        *,
        number: int = 0,
        takes_callables: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        if tokenizer is None:
            logger.warning(
                "%s has no tokenizer: only token ids can be sent, and only token ids come back", files.name
            )
        self.limits: EngineLimits | None = None
        """The engine's limits, to be set once its core is ready; no request is taken before."""
        self.sampling_defaults = {} if config.generation_config == "vllm" else sampling_defaults(files)
        """What the model recommends for parameters that a request leaves open."""
        self._pooler = Pooler.of(files, config.pooler_config)
        self.parsers = load_parsers(config)
        """Parsers of reasoning and of tool calls in chats."""
        self._config = config
        self._processors = load_classes(config.logits_processors, config.plugin_path)
        self._takes_callables = takes_callables
        self.eos_ids = all_eos_ids(tokenizer, files)
        """Tokens that end an answer: the tokenizer's EOS, and those of the model's files."""
        self._unseeded = itertools.count(config.seed + (number << _SEED_BITS))
        self._outputs = OutputProcessor(tokenizer, clock)
        self._guides = None if tokenizer is None else GuideReader(tokenizer, self._load_grammars)
        self._own_template: ChatTemplate | None = None
        if config.chat_template is not None:
            self._own_template = ChatTemplate(read_template(config.chat_template), tokenizer)

    @property
    def unfinished(self) -> int:
        """Requests added and neither finished nor aborted."""
        return len(self._outputs)

    @property
    def requests(self) -> Mapping[str, RequestState]:
        """The unfinished requests by id."""
        return self._outputs.requests

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            RequestError: the model has none.
        """
        if self.tokenizer is None:
            raise RequestError(NO_TOKENIZER)
        return self.tokenizer

    def hf_tokenizer(self) -> HFTokenizer:
        """Return the tokenizer and the chat templates behind transformers' names. Raises as above."""
        return HFTokenizer(self.require_tokenizer(), self._template)

    def prepare_prompt(
        self, prompt: Any, add_special_tokens: bool = True, *, cache_salt: str | None = None
    ) -> Prompt:
        """Return a prompt as token ids.

        Args:
            prompt: Text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`, the latter two with a
                `cache_salt` or without; or a `Prompt`.
            add_special_tokens: Put around text what the tokenizer puts there, such as BOS.
            cache_salt: The salt of a prompt that brings none.

        Raises:
            RequestError: it is none of these, or it is text and the model has no tokenizer.
        """
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(text, str):
            self._check_length(text)
        return _salted(read_prompt(prompt, self.tokenizer, add_special_tokens), cache_salt)

    def prepare_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        chat_template: str | None = None,
        cache_salt: str | None = None,
        add_special_tokens: bool = False,
        **options: Any,
    ) -> Prompt:
        """Return a conversation as one prompt.

        Args:
            messages: Mappings with "role" and "content".
            chat_template: A Jinja template to use in place of the model's. It runs in a sandbox, but may
                still take long: let only trusted callers give one.
            cache_salt: Shares cached prefixes only with prompts of the same salt.
            add_special_tokens: Put around the text what the tokenizer puts there, beside the special tokens
                that the template writes.
            options: Keyword arguments of `ChatTemplate.render`.

        Raises:
            RequestError: there is no template or tokenizer, or the template refuses the messages.
        """
        text = self._template(chat_template).render(messages, **options)
        self._check_length(text, "messages")
        ids = encode_text(text, self.tokenizer, add_special_tokens)
        if not ids:
            raise RequestError(
                "the messages make an empty prompt: it must hold at least one token", "messages"
            )
        return Prompt(text, ids, cache_salt)

    def prepare_text(
        self,
        prompt: Any,
        add_special_tokens: bool = True,
        *,
        truncate: int | None = None,
        truncation_side: Literal["left", "right"] = "right",
        cache_salt: str | None = None,
    ) -> Prompt:
        """Return a prompt that is to be pooled as token ids.

        Args:
            prompt: As for `prepare_prompt`, as are `add_special_tokens` and `cache_salt`.
            truncate: Most tokens to keep, those put around a text included; -1 for as many as the model
                takes, None for all.
            truncation_side: Whether tokens are cut off at the right or at the left.

        Raises:
            RequestError: as `prepare_prompt`, or the prompt is empty or too long, or `truncate` is 0 or more
                than the model takes.
        """
        if self.limits is None:
            raise RequestError(_LOADING)
        limit = self.limits.max_model_len
        if truncate is None:
            whole = self.prepare_prompt(prompt, add_special_tokens, cache_salt=cache_salt)
            check_prompt(whole.token_ids, self.limits)
            check_fits(len(whole.token_ids), self.limits)
            return whole
        if truncate == 0 or not -1 <= truncate <= limit:
            raise RequestError(
                f"truncate_prompt_tokens must be between 1 and max_model_len={limit}, or -1 for that,"
                f" got {truncate}",
                "truncate_prompt_tokens",
            )
        whole = read_prompt(prompt, self.tokenizer, add_special_tokens)
        check_prompt(whole.token_ids, self.limits)
        plain = None
        if add_special_tokens and self.tokenizer is not None and whole.text is not None:
            plain = self.tokenizer.encode(whole.text, add_special_tokens=False)
        most = limit if truncate == -1 else truncate
        return _salted(replace(whole, token_ids=truncated(whole, plain, most, truncation_side)), cache_salt)

    def pooling_plan(self, params: PoolingParams | None = None) -> PoolingPlan:
        """Return how prompts are pooled with `params`, or as the model does it.

        Raises:
            RequestError: they cannot be pooled so.
        """
        if self.limits is None:
            raise RequestError(_LOADING)
        return self._pooler.plan(params or PoolingParams(), self.limits)

    def bad_word_ids(self, params: SamplingParams) -> list[list[int]]:
        """Return the tokens of `params.bad_words`; many of them take a while.

        Raises:
            RequestError: one is no token.
        """
        if self.tokenizer is None:
            return []
        return [ids for word in params.bad_words for ids in bad_word_ids(word, self.tokenizer)]

    def grammar(self, params: SamplingParams, thinking: Thinking | None = None) -> str | None:
        """Return the grammar of `params.structured_outputs`, compiled once to see that it compiles.

        With `thinking` such reasoning may come first.

        The first one takes up to a second, a large one some tenths. Other threads run meanwhile.

        Raises:
            RequestError: it does not compile, or there is none for this model.
        """
        wanted = params.structured_outputs
        if wanted is None:
            return None
        if self._guides is None:
            raise RequestError("structured_outputs needs text, and this model has no tokenizer", GUIDE_FIELD)
        return self._guides.read(wanted, thinking)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens written out. Other threads run meanwhile.

        Raises:
            RequestError: the model has no tokenizer.
        """
        detokenizer = IncrementalDetokenizer(self.require_tokenizer(), skip_special_tokens=False)
        pieces = [detokenizer.push(ids[place : place + _PIECE]) for place in range(0, len(ids), _PIECE)]
        return "".join(pieces) + detokenizer.flush()

    def add(self, request: Request, *, shorten: bool = False) -> Added:
        """Take a request; with `shorten`, a `max_tokens` that there is no room for is lowered to the room.

        Raises:
            RequestError: it cannot be run as asked; nothing has changed then.
        """
        prompt, params = request.prompt, request.params
        if self.limits is None:
            raise RequestError(_LOADING)
        if request.request_id in self._outputs:
            raise RequestError(
                f"request id {request.request_id!r} belongs to an unfinished request", "request_id"
            )
        policy = self._config.scheduling_policy
        if request.priority and policy != "priority" and policy in POLICIES:
            raise RequestError(f"priority has no effect with scheduling_policy {policy!r}", "priority")
        check_prompt(prompt.token_ids, self.limits)
        check_salt(prompt.cache_salt)
        if request.pooling is not None:
            check_fits(len(prompt.token_ids), self.limits)
            max_tokens = 1
        else:
            max_tokens = output_limit(len(prompt.token_ids), params, self.limits, shorten=shorten)
        if params.min_tokens > max_tokens:
            params = msgspec.structs.replace(params, min_tokens=max_tokens)
        check_params(params, self.limits, max_logprobs=self._config.max_logprobs, tokenizer=self.tokenizer)
        names = self._config.logits_processors
        check_request(params, self._processors, names, takes_callables=self._takes_callables)
        bad_words = request.bad_word_ids
        if bad_words is None:
            bad_words = self.bad_word_ids(params)
        eos_ids = [i for i in self.eos_ids if i < self.limits.vocab_size]
        stop_ids = list(dict.fromkeys(([] if params.ignore_eos else eos_ids) + params.stop_token_ids))
        grammar = request.grammar
        if params.structured_outputs is not None and grammar is None:
            grammar = self.grammar(params, request.thinking)
        check_choice(params, stop_ids if grammar is None else [], bad_words, self.limits.vocab_size)
        guide = None if grammar is None else Guide(grammar, may_end=bool(stop_ids))
        if guide is not None:
            stop_ids = stop_ids or eos_ids
            params = _beside_a_grammar(params, stop_ids)
        ids = np.array(prompt.token_ids, np.int32)
        messages = [
            AddRequest(
                number=self._outputs.new_number(),
                prompt=ids,
                max_tokens=max_tokens,
                sampling=RowSampling(
                    params if index == 0 else _without_prompt_logprobs(params),
                    stop_ids,
                    list(bad_words),
                    self._seed(params, index),
                    pooling=None if request.pooling is None else request.pooling.kind,
                    guide=guide,
                ),
                cache_salt=prompt.cache_salt,
                priority=request.priority,
            )
            for index in range(params.n)
        ]
        return Added(self._outputs.add(request, self.eos_ids, messages), messages)

    def resume(self, numbers: Iterable[int], *, alone: Collection[int] = ()) -> dict[int, AddRequest]:
        """Return what is to be sent to another core, in this order, by the numbers that the first one knows.

        It goes on after the tokens so far, under a new number: what still comes for the old one is dropped.
        Samples that have finished, or were aborted, are passed over.

        Args:
            numbers: Of samples whose core has ended.
            alone: Those of them that are to run in steps of their own.
        """
        return self._outputs.resume(numbers, alone)

    def process(self, outputs: Outputs) -> Processed:
        """Take one step's outputs; return what they change for callers."""
        return self._outputs.process(outputs)

    def abort(self, request_id: str) -> list[int]:
        """Forget a request; return the numbers that a core must drop: none when it is unknown or finished."""
        return self._outputs.abort(request_id)

    def _load_grammars(self) -> Grammars:
        if self.limits is None or self.tokenizer is None:
            raise RequestError(_LOADING)
        return Grammars(self.tokenizer, self.limits.vocab_size, self.eos_ids)

    def _check_length(self, text: str, param: str = "prompt") -> None:
        """Refuse a text that cannot fit before anybody's time is spent on cutting it into tokens."""
        if self.limits is None or self.tokenizer is None:
            return
        if len(text) > self.limits.max_model_len * self.tokenizer.longest_token:
            fewest = -(-len(text) // self.tokenizer.longest_token)
            raise ContextLengthError(
                self.limits.max_model_len,
                f"its {len(text)} characters make at least {fewest} tokens",
                param,
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

    def _seed(self, params: SamplingParams, index: int) -> int:
        if params.seed is None:
            return _as_int64(next(self._unseeded))
        return _as_int64(params.seed + index)


def _as_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _salted(prompt: Prompt, cache_salt: str | None) -> Prompt:
    if cache_salt is None or prompt.cache_salt is not None:
        return prompt
    return replace(prompt, cache_salt=cache_salt)


@lru_cache(maxsize=16)
def _compiled(source: str, tokenizer: Tokenizer | None) -> ChatTemplate:
    return ChatTemplate(source, tokenizer)


def _beside_a_grammar(params: SamplingParams, stop_ids: Sequence[int]) -> SamplingParams:
    """Return what a worker needs of parameters whose grammar is told apart, which says how to end."""
    allowed = params.allowed_token_ids
    if allowed is not None:
        allowed = list(dict.fromkeys([*allowed, *stop_ids]))
    return msgspec.structs.replace(params, structured_outputs=None, allowed_token_ids=allowed)


def _without_prompt_logprobs(params: SamplingParams) -> SamplingParams:
    """A prompt is the same for every sample: one of them reports on it."""
    if params.prompt_logprobs is None:
        return params
    return msgspec.structs.replace(params, prompt_logprobs=None)
