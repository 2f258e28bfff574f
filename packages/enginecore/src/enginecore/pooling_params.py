"""Pooling parameters: how the hidden states of a prompt become one vector."""

from typing import Literal, get_args

import msgspec

Pooling = Literal["last", "mean"]
"""last: the hidden state of the last token; mean: the mean over all tokens. Both after the final norm."""


class PoolingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How to make an embedding. What is None is as the model, or the option `pooler_config`, says.

    Raises:
        ValueError: a field has the wrong type or is out of range; the message names it.
    """

    dimensions: int | None = None
    """Keep the first so many numbers of a vector and normalise it again, for models trained for it."""
    use_activation: bool | None = None
    """Whether the vector gets length 1."""
    pooling_type: str | None = None
    """`last` or `mean`, in either case."""
    skip_reading_prefix_cache: bool | None = None
    """Whether the whole prompt is computed; by default only for `mean`, which needs it."""

    def __post_init__(self) -> None:
        for name in ("use_activation", "skip_reading_prefix_cache"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise ValueError(f"{name} must be true or false, got {value!r:.80}")
        value = self.dimensions
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"dimensions must be an integer of at least 1, got {value!r:.80}")
        if self.pooling_type is not None:
            self.pooling_type = pooling_of(self.pooling_type)


def pooling_of(name: object) -> Pooling:
    """Return the pooling that `name` stands for, in upper or lower case.

    Raises:
        ValueError: there is no such pooling.
    """
    for known in get_args(Pooling):
        if isinstance(name, str) and name.lower() == known:
            return known
    raise ValueError(f"pooling_type must be one of {', '.join(get_args(Pooling))}, got {name!r:.80}")
