"""Sampling parameters: vLLM's names, defaults and error rules."""

import math
import re
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import msgspec

MIN_TEMPERATURE = 0.01
"""Positive temperatures below this are raised to it: dividing logits by less overflows."""

MAX_LOGIT_BIAS = 100.0

MAX_SAMPLES = 16384
"""Most samples of one prompt."""


class RequestOutputKind(IntEnum):
    """The outputs that a request's iterator yields."""

    CUMULATIVE = 0
    """Every output holds all tokens so far."""
    DELTA = 1
    """Every output holds the tokens since the last one."""
    FINAL_ONLY = 2
    """One output, when the request has finished."""


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Rules for choosing tokens and for stopping. Validated on construction.

    Raises:
        ValueError: a field is out of range or contradicts another; the message names it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 considers every token."""
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None generates up to the model's length limit."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Number of most likely tokens to report beside the chosen one; -1 is the whole vocabulary."""
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    structured_outputs: Any = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._normalise()
        self._check_counts()
        self._check_ranges()
        self._check_lists()
        self._check_combinations()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def _normalise(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, list | tuple):
                raise ValueError(f"{name} must be a list, got {value!r:.80}")
        self.stop = list(self.stop or [])
        self.stop_token_ids = list(self.stop_token_ids or [])
        self.bad_words = list(self.bad_words or [])
        if self.top_k == -1:
            self.top_k = 0
        if self.logprobs is True:
            self.logprobs = 1
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

    def _check_lists(self) -> None:
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must hold non-empty strings, got {text!r}")
        for text in self.bad_words:
            if not isinstance(text, str) or not text:
                raise ValueError(f"bad_words must hold non-empty strings, got {text!r}")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids is empty: no token could be chosen")
            for token in self.allowed_token_ids:
                _integer("allowed_token_ids", token, 0)
        if self.logit_bias is not None:
            self.logit_bias = _clamped_bias(self.logit_bias)

    def _check_combinations(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}"
            )
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True")
        if self.greedy and self.n > 1:
            raise ValueError(f"n must be 1 with temperature 0 (every sample would be the same), got {self.n}")
        if not self.spaces_between_special_tokens:
            raise ValueError("spaces_between_special_tokens=False is not supported")
        if self.structured_outputs is not None:
            raise ValueError("structured_outputs is not supported by this version")


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


def _clamped_bias(bias: dict[Any, Any]) -> dict[int, float]:
    clamped = {}
    for key, value in bias.items():
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
        ("logit_bias", list(params.logit_bias or ())),
    ]
    for name, tokens in named:
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"{name} holds token id {token}, but the vocabulary ends at {vocab_size - 1}"
                )
