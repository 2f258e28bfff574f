"""Sampling parameters: vLLM's names, defaults and error rules."""

import copy
import math
import re
from collections.abc import Mapping, Sequence, Sized
from enum import IntEnum
from typing import Any, Self

import msgspec

from enginecore.logits_processors import takes_prompt
from enginecore.structured_outputs import StructuredOutputsParams

MIN_TEMPERATURE = 0.01
"""Positive temperatures below this are raised to it: dividing logits by less overflows."""

MAX_LOGIT_BIAS = 100.0

MAX_SAMPLES = 16384
"""Most samples of one prompt."""

MAX_STOPS = 256
"""Most stop strings of one request."""

MAX_BAD_WORDS = 1024
"""Most bad words of one request."""

MAX_TEXT = 256
"""Most characters of a stop string or bad word."""

MAX_STOP_IDS = 4096
"""Most ids in `stop_token_ids`."""

MAX_ALLOWED_IDS = 262_144
"""Most ids in `allowed_token_ids`: a large vocabulary."""

MAX_BIASES = 16384
"""Most token ids in `logit_bias`."""

MAX_LOGPROB_IDS = 128
"""Most ids in `logprob_token_ids`."""

_INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
_NUMBERS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "min_p",
)
_FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "skip_reading_prefix_cache",
    "equal_samples",
)
_TEXTS = {"stop": MAX_STOPS, "bad_words": MAX_BAD_WORDS}
_IDS = {
    "stop_token_ids": MAX_STOP_IDS,
    "allowed_token_ids": MAX_ALLOWED_IDS,
    "logprob_token_ids": MAX_LOGPROB_IDS,
}


class RequestOutputKind(IntEnum):
    """The outputs that a request's iterator yields."""

    CUMULATIVE = 0
    """Every output holds all tokens so far."""
    DELTA = 1
    """Every output holds the tokens since the last one."""
    FINAL_ONLY = 2
    """One output, when the request has finished."""


class SamplingParams(msgspec.Struct, omit_defaults=True):
    """Rules for choosing tokens and for stopping. Validated on construction.

    Fields stand in vLLM's order, which is that of positional arguments. Numbers and arrays of numpy and torch
    are taken as Python's own numbers and lists.

    Raises:
        ValueError: a field is out of range or contradicts another; the message names it.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 considers every token."""
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = []
    """At most `MAX_STOPS`, each of at most `MAX_TEXT` characters."""
    stop_token_ids: list[int] = []
    """At most `MAX_STOP_IDS`."""
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None generates up to the model's length limit."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Number of most likely tokens to report beside the chosen one; -1 is the whole vocabulary."""
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    """Report these tokens beside the chosen one, in place of the most likely; at most `MAX_LOGPROB_IDS`."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    """The form of the output; a mapping of its fields is taken too."""
    logit_bias: dict[int, float] | None = None
    """At most `MAX_BIASES` ids."""
    allowed_token_ids: list[int] | None = None
    """At most `MAX_ALLOWED_IDS`."""
    extra_args: dict[str, Any] | None = None
    """Plain values for registered logits processors."""
    bad_words: list[str] = []
    """At most `MAX_BAD_WORDS`, each of at most `MAX_TEXT` characters."""
    skip_reading_prefix_cache: bool | None = None
    """Whether the whole prompt is computed; by default only with `prompt_logprobs`, which need it."""
    equal_samples: bool = False
    """Whether `n` may be above 1 at temperature 0, at which all samples are equal. Not one of vLLM's."""
    logits_processors: Any = None
    """Functions of (generated_ids, logits) or (prompt_ids, generated_ids, logits): lists of token ids, and
    the logits float32 [vocab] of the next token, which they return changed. Only for engines in this process.
    """

    @classmethod
    def from_optional(cls, **fields: Any) -> Self:
        """Return parameters of the fields that are not None, for callers to whom None means the default.

        Only `max_tokens`, to which None means something else, is taken as it is.
        """
        return cls(
            **{name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
        )

    def clone(self) -> Self:
        """Return a copy that shares nothing with this one."""
        # But for callables, which may be anything.
        shared = {id(function): function for function in self.logits_processors or ()}
        return copy.deepcopy(self, shared)

    def __post_init__(self) -> None:
        self._normalise()
        self._check_counts()
        self._check_ranges()
        self._check_lists()
        self._check_combinations()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def wants_logprobs(self) -> bool:
        """Whether generated tokens are to have log probabilities."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    def _normalise(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [str(self.stop)]
        for name in _TEXTS:
            setattr(self, name, [_plain(entry, str) for entry in _list(name, getattr(self, name)) or []])
        for name in _IDS:
            value = _list(name, getattr(self, name))
            setattr(self, name, None if value is None else [_plain(entry, int) for entry in value])
        self.stop_token_ids = self.stop_token_ids or []
        self.logits_processors = _list("logits_processors", self.logits_processors) or None
        self.logprob_token_ids = self.logprob_token_ids or None
        if self.logprobs is True:
            self.logprobs = 1
        for names, kind in ((_INTEGERS, int), (_NUMBERS, float), (_FLAGS, bool)):
            for name in names:
                setattr(self, name, _plain(getattr(self, name), kind))
        if self.structured_outputs is not None:
            try:
                self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)
            except ValueError as error:
                raise ValueError(f"structured_outputs: {error}") from error
        if self.top_k == -1:
            self.top_k = 0
        if isinstance(self.temperature, float | int) and 0 < self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE

    def _check_counts(self) -> None:
        _integer("n", self.n, 1, MAX_SAMPLES)
        _integer("top_k", self.top_k, 0, note="0 or -1 turns it off")
        _integer("min_tokens", self.min_tokens, 0)
        _integer("max_tokens", self.max_tokens, 1, optional=True)
        _integer("logprobs", self.logprobs, -1, optional=True)
        _integer("prompt_logprobs", self.prompt_logprobs, -1, optional=True)
        _integer("seed", self.seed, -(2**63), 2**63 - 1, optional=True)

    def _check_ranges(self) -> None:
        _number("temperature", self.temperature, 0.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, open_low=True)
        for name in _FLAGS:
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name == "skip_reading_prefix_cache"):
                raise ValueError(f"{name} must be true or false, got {value!r:.80}")

    def _check_lists(self) -> None:
        for name, most in _TEXTS.items():
            _check_texts(name, getattr(self, name), most)
        for name, most in _IDS.items():
            tokens = getattr(self, name) or ()
            _check_count(name, tokens, most, "token ids")
            for token in tokens:
                _integer(name, token, 0)
        if self.allowed_token_ids == []:
            raise ValueError("allowed_token_ids is empty: no token could be chosen")
        if self.logit_bias is not None:
            self.logit_bias = _clamped_bias(self.logit_bias)
        if self.extra_args is not None:
            _check_extra(self.extra_args)
        for function in self.logits_processors or ():
            if not callable(function):
                raise ValueError(f"logits_processors must hold callables, got {function!r:.80}")
            takes_prompt(function)

    def _check_combinations(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}"
            )
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True")
        if self.greedy and self.n > 1 and not self.equal_samples:
            raise ValueError(f"n must be 1 with temperature 0 (every sample would be the same), got {self.n}")
        if not self.spaces_between_special_tokens:
            raise ValueError("spaces_between_special_tokens=False is not supported")
        ids = self.logprob_token_ids
        if ids is not None and self.logprobs is not None and self.logprobs != len(ids):
            raise ValueError(
                f"logprobs must be left out with logprob_token_ids, or be their number, {len(ids)}, "
                f"got {self.logprobs}"
            )
        if self.skip_reading_prefix_cache is False and self.prompt_logprobs is not None:
            raise ValueError("skip_reading_prefix_cache must not be False with prompt_logprobs")


def _list(name: str, value: Any) -> list[Any] | None:
    """Return a list, tuple or one-dimensional array as a list."""
    if value is None:
        return None
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must be a list, got {value!r:.80}")
    return list(value)


def _plain(value: Any, kind: type) -> Any:
    """Return a number or text of numpy's or torch's as Python's own; anything else as it is."""
    if type(value) is kind or value is None or isinstance(value, bool):
        return value
    if kind is str:
        return str(value) if isinstance(value, str) else value
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    return float(value) if kind is float and isinstance(value, float) else value


def _check_count(name: str, entries: Sized, most: int, of: str) -> None:
    if len(entries) > most:
        raise ValueError(f"{name} may hold at most {most} {of}, got {len(entries)}")


def _check_texts(name: str, texts: Sequence[Any], most: int) -> None:
    _check_count(name, texts, most, "strings")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name} must hold non-empty strings, got {text!r:.80}")
        if len(text) > MAX_TEXT:
            raise ValueError(
                f"{name} may hold strings of at most {MAX_TEXT} characters, got one of {len(text)}"
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name} holds {text!r:.80}: half a surrogate pair is no character") from None


def _check_extra(extra: Any) -> None:
    if not isinstance(extra, dict) or not all(isinstance(key, str) for key in extra):
        raise ValueError(f"extra_args must map names to values, got {extra!r:.80}")
    try:
        msgspec.msgpack.encode(extra)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise ValueError(f"extra_args must hold plain values: {error}") from error


def _integer(
    name: str,
    value: Any,
    low: int,
    high: int | None = None,
    *,
    optional: bool = False,
    note: str = "",
) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be {limits}{f' ({note})' if note else ''}, got {value}")


def _number(name: str, value: Any, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r}")
    inside = (low < value if open_low else low <= value) and value <= high and math.isfinite(value)
    if not inside:
        bracket = "(" if open_low else "["
        limits = (
            f"{bracket}{low:g}, {high:g}]"
            if math.isfinite(high)
            else (f"greater than {low:g}" if open_low else f"at least {low:g}")
        )
        where = f"in {limits}" if math.isfinite(high) else limits
        raise ValueError(f"{name} must be finite and {where}, got {value}")


def _is_token_id(key: Any) -> bool:
    return isinstance(key, str) and re.fullmatch(r"0|-?[1-9][0-9]{0,18}", key, re.ASCII) is not None


def _clamped_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, got {bias!r:.80}")
    _check_count("logit_bias", bias, MAX_BIASES, "token ids")
    clamped = {}
    for given, number in bias.items():
        key, value = _plain(given, int), _plain(number, float)
        if isinstance(key, bool) or not (isinstance(key, int) or _is_token_id(key)):
            raise ValueError(f"logit_bias keys must be token ids, got {key!r:.40}")
        token = int(key)
        _integer("logit_bias key", token, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise ValueError(f"logit_bias[{token}] must be a number, got {value!r}")
        clamped[token] = max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, float(value)))
    return clamped


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError when a token id in `params` is not one of `vocab_size` ids."""
    named: list[tuple[str, Sequence[int]]] = [
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("logprob_token_ids", params.logprob_token_ids or ()),
        ("logit_bias", list(params.logit_bias or ())),
    ]
    for name, tokens in named:
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"{name} holds token id {token}, but the vocabulary ends at {vocab_size - 1}"
                )
