"""Speculative decoding as `speculative_config` asks for it; its keys are vLLM's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from enginecore.errors import ConfigError

METHODS = ("ngram",)

_DEFAULT_LOOKUP = 5
"""Length of the n-grams that are looked up when none is given: vLLM's."""

_CHEAP_TOKENS = {"cpu": 8, "cuda": 256}
"""Tokens that a step runs in about the time of one, which goes to reading the weights.

Beyond, each further token costs as much as the last: drafts do not pay unless nearly all are accepted.
"""


@dataclass(frozen=True, slots=True)
class Speculation:
    """Drafts that n-grams of a request's own tokens propose; see `core.ngram`.

    Raises:
        ConfigError: a number is out of range; the message names its key.
    """

    num_speculative_tokens: int
    """Most drafts of a request in a step."""
    prompt_lookup_min: int
    """Tokens of the shortest n-gram that is looked up."""
    prompt_lookup_max: int
    """Tokens of the longest one, which is looked up first."""

    def __post_init__(self) -> None:
        for name in ("num_speculative_tokens", "prompt_lookup_min"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"speculative_config: {name} must be at least 1, got {value}")
        if self.prompt_lookup_max < self.prompt_lookup_min:
            raise ConfigError(
                f"speculative_config: prompt_lookup_max={self.prompt_lookup_max} is less than "
                f"prompt_lookup_min={self.prompt_lookup_min}"
            )

    def max_step_tokens(self, device: str, budget: int) -> int:
        """Return the most tokens of a step with drafts on a cpu or cuda `device`, where all have `budget`.

        A request that runs alone may have all it asks for, within half the budget: so that prompts that come
        do not wait for drafts.
        """
        return min(max(_CHEAP_TOKENS[device], 1 + self.num_speculative_tokens), budget // 2)


def read_speculation(given: Mapping[str, Any]) -> Speculation:
    """Return what the entries of `speculative_config` ask for.

    Raises:
        ConfigError: an entry is unknown, missing, of the wrong type or out of range.
    """
    known = ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
    for name in given:
        if name not in known:
            raise ConfigError(f"speculative_config: unknown key {name!r}; known keys: {', '.join(known)}")
    method = given.get("method")
    if method not in METHODS:
        raise ConfigError(
            f"speculative_config: method must be {' or '.join(METHODS)}, got {method!r}: "
            "drafts come from n-grams of the request, and draft models are not supported"
        )
    count = _integer(given, "num_speculative_tokens")
    if count is None:
        raise ConfigError("speculative_config needs num_speculative_tokens, the most drafts of a request")
    least, most = _integer(given, "prompt_lookup_min"), _integer(given, "prompt_lookup_max")
    if least is None:
        least = _DEFAULT_LOOKUP if most is None else most
    return Speculation(count, least, least if most is None else most)


def _integer(given: Mapping[str, Any], name: str) -> int | None:
    value = given.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ConfigError(f"speculative_config: {name} must be an integer, got {value!r}")
    return value
