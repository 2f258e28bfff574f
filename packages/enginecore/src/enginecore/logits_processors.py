"""Logits processors: code of somebody else that changes logits before a token is chosen.

`LogitsProcessor` is the base of classes that the option `logits_processors` names; each worker that samples
makes one of each. Needs no torch, so that front-ends can validate requests.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from enginecore.errors import ConfigError, RequestError
from enginecore.plugins import load

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from enginecore.sampling_params import SamplingParams


class Positions(NamedTuple):
    """Where tokens are to be chosen: [k] each. A row may stand several times, with growing lengths."""

    rows: NDArray[np.int32]
    num_prompt: NDArray[np.int32]
    """Tokens of each row's prompt."""
    lengths: NDArray[np.int64]
    """Tokens before each position: the prompt's and those generated."""
    tokens: "Tensor"
    """int32 [max_rows, max_len], on the device of the logits."""

    def prompt_ids(self, index: int) -> list[int]:
        """Return the prompt's tokens at a position; on a device this waits for it."""
        return self.tokens[self.rows[index], : self.num_prompt[index]].tolist()

    def generated_ids(self, index: int) -> list[int]:
        """Return the tokens generated before a position; on a device this waits for it."""
        return self.tokens[self.rows[index], self.num_prompt[index] : self.lengths[index]].tolist()

    def take(self, index: int) -> "Positions":
        """Return one of the positions by itself."""
        part = slice(index, index + 1)
        return Positions(self.rows[part], self.num_prompt[part], self.lengths[part], self.tokens)


class LogitsProcessor:
    """Base of processors. Arguments of a request are in its `SamplingParams.extra_args`."""

    @classmethod
    def validate_params(cls, params: "SamplingParams") -> None:
        """Raise ValueError where `params` cannot be used. Called by front-ends, for each request."""

    def __init__(self, max_rows: int, vocab_size: int, device: "torch.device") -> None:
        """Prepare for rows 0 to max_rows - 1; called once a worker, before it loads the model."""

    def add(self, row: int, params: "SamplingParams") -> bool:
        """Take a request into `row`; return whether this processor changes its logits.

        A request that was preempted is added again, with tokens that it has generated already.
        """
        raise NotImplementedError(f"{type(self).__name__} has no add")

    def remove(self, row: int) -> None:
        """Forget a row for which `add` returned True: its request has ended or was preempted.

        Called with the next step, before anything is added in its place.
        """

    def apply(self, logits: "Tensor", positions: Positions) -> "Tensor":
        """Return the changed logits of rows that were added: float32 [k, vocab], `logits` itself or another.

        Called once a step with all positions of such rows. Where that raises, each is tried by itself, so
        that only requests at fault end.
        """
        raise NotImplementedError(f"{type(self).__name__} has no apply")


def load_classes(references: Sequence[str], plugin_path: str = ".") -> list[type[LogitsProcessor]]:
    """Return the processors' classes that `module:Class` name.

    Raises:
        ConfigError: there is no such class, or it is no LogitsProcessor; the message has the reference.
    """
    found = []
    for reference in references:
        given = load(reference, plugin_path)
        if not isinstance(given, type) or not issubclass(given, LogitsProcessor):
            raise ConfigError(f"{reference} is no logits processor: inherit from enginecore.LogitsProcessor")
        found.append(given)
    return found


def check_request(
    params: "SamplingParams",
    classes: Sequence[type[LogitsProcessor]],
    names: Sequence[str],
    *,
    takes_callables: bool,
) -> None:
    """Have each class look at a request's parameters; `names` is what the options call them.

    Raises:
        RequestError: one of them refuses it, or it brings callables where these are not taken.
    """
    if params.logits_processors and not takes_callables:
        raise RequestError(
            "logits_processors of a request run only in the caller's own process, not in this engine's: "
            "register a class with the option logits_processors=module:Class",
            "logits_processors",
        )
    for name, found in zip(names, classes, strict=True):
        try:
            found.validate_params(params)
        except Exception as error:  # whatever somebody else's class raises
            said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise RequestError(f"extra_args: {name}: {said}", "extra_args") from error


def takes_prompt(processor: Callable[..., Any]) -> bool:
    """Return whether a callable wants (prompt_ids, generated_ids, logits) rather than the last two.

    Raises:
        ValueError: it takes neither two nor three arguments by position.
    """
    try:
        signature = inspect.signature(processor)
    except (TypeError, ValueError):
        return False  # code without a signature, such as a C function: the plain form
    for count in (2, 3):
        try:
            signature.bind(*[None] * count)
        except TypeError:
            continue
        # With a default for the third, as with any number of arguments, the plain form is meant.
        return count == 3
    raise ValueError(
        f"logits_processors holds {processor!r:.80}, which takes neither (generated_ids, logits) nor "
        "(prompt_ids, generated_ids, logits)"
    )
