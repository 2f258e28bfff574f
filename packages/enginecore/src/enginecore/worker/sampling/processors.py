"""Logits processors at work: the registered classes and the callables of requests, over a batch.

What they raise ends the requests that it was raised for, and nobody else.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from enginecore.config import EngineConfig
from enginecore.errors import ConfigError
from enginecore.logits_processors import LogitsProcessor, Positions, load_classes, takes_prompt
from enginecore.sampling_params import SamplingParams
from enginecore.worker.upload import upload_integers

logger = logging.getLogger(__name__)


class Registered(NamedTuple):
    """A processor that the options name."""

    name: str
    processor: LogitsProcessor


def make_processors(config: EngineConfig, vocab_size: int, device: torch.device) -> list[Registered]:
    """Make one of each class that the option `logits_processors` names.

    Raises:
        ConfigError: there is no such class, or its constructor raises.
    """
    classes = load_classes(config.logits_processors, config.plugin_path)
    found = []
    for name, kind in zip(config.logits_processors, classes, strict=True):
        try:
            found.append(Registered(name, kind(config.max_num_seqs, vocab_size, device)))
        except Exception as error:  # whatever somebody else's class raises
            said = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{name}: making the logits processor failed: {said}") from error
    return found


class _Call(NamedTuple):
    """A callable of a request."""

    name: str
    function: Callable[..., Any]
    takes_prompt: bool


class _RowProcessors(NamedTuple):
    """Processors of one row."""

    registered: list[int]
    """Indices of the registered ones."""
    calls: list[_Call]
    error: str | None
    """Why the row cannot be run: a processor did not take it."""


class ProcessorRows:
    """The rows that processors change the logits of."""

    def __init__(self, registered: Sequence[Registered] = ()) -> None:
        self._registered = registered
        self._rows: dict[int, _RowProcessors] = {}

    def set(self, row: int, params: SamplingParams) -> bool:
        """Offer a row to all processors; return whether one of them changes its logits."""
        self.free(row)
        used: list[int] = []
        failure = None
        for index, (name, processor) in enumerate(self._registered):
            try:
                if processor.add(row, params):
                    used.append(index)
            except Exception as error:
                failure = _failure(name, error)
        calls = [
            _Call(getattr(function, "__name__", type(function).__name__), function, takes_prompt(function))
            for function in params.logits_processors or ()
        ]
        if used or calls or failure is not None:
            self._rows[row] = _RowProcessors(used, calls, failure)
        return row in self._rows

    def free(self, row: int) -> None:
        """Take a row from its processors."""
        found = self._rows.pop(row, None)
        for index in () if found is None else found.registered:
            name, processor = self._registered[index]
            try:
                processor.remove(row)
            except Exception as error:
                # Its request has ended, so there is nobody to tell.
                _failure(name, error)

    def columns(
        self,
        rows: np.ndarray,
        index: np.ndarray,
        places: np.ndarray,
        num_prompt: np.ndarray,
        device: torch.device,
    ) -> "ProcessorColumns":
        """Return how processors change a batch, int[k] each, in which all of `rows` have some.

        `index` is a row's number among those that sample, `places` among those whose logits are changed.
        """
        held = [self._rows[row] for row in rows.tolist()]
        groups = []
        for number, (name, processor) in enumerate(self._registered):
            users = np.array([number in row.registered for row in held])
            if users.any():
                where = upload_integers([places[users]], device)[0]
                columns = [column[users] for column in (index, places, rows, num_prompt)]
                groups.append(_Group(name, processor, where, *columns))
        called = [
            _Called(row.calls, *entry)
            for row, *entry in zip(
                held, index.tolist(), places.tolist(), rows.tolist(), num_prompt.tolist(), strict=True
            )
            if row.calls
        ]
        broken = {
            int(where): row.error for where, row in zip(index, held, strict=True) if row.error is not None
        }
        blamed = {
            int(where): self._blame(row) for where, row in zip(index, held, strict=True) if row.error is None
        }
        return ProcessorColumns(groups, called, broken, blamed, dict(zip(index.tolist(), places.tolist())))

    def _blame(self, row: _RowProcessors) -> str:
        names = [self._registered[index].name for index in row.registered]
        names += [call.name for call in row.calls]
        return f"after logits processor {', '.join(names)} no logit is finite: no token could be chosen"


class _Group(NamedTuple):
    """The positions of a batch that a registered processor is called with."""

    name: str
    processor: LogitsProcessor
    where: Tensor
    """int64 [k]: `places` on the device."""
    index: np.ndarray
    places: np.ndarray
    rows: np.ndarray
    num_prompt: np.ndarray

    def apply(self, logits: Tensor, lengths: np.ndarray, tokens: Tensor) -> dict[int, str]:
        positions = Positions(self.rows, self.num_prompt, lengths[self.index], tokens)
        try:
            # A copy: a processor that raises half-way has changed nothing, and it can reach no other row.
            changed = self.processor.apply(logits[self.where], positions)
            logits[self.where] = _checked(changed, (len(self.rows), logits.shape[-1]), logits)
        except Exception as error:
            if len(self.rows) == 1:
                return {int(self.index[0]): _failure(self.name, error)}
            return self._apply_each(logits, positions)
        return {}

    def _apply_each(self, logits: Tensor, positions: Positions) -> dict[int, str]:
        failures = {}
        for number, place in enumerate(self.places.tolist()):
            try:
                changed = self.processor.apply(logits[place : place + 1].clone(), positions.take(number))
                logits[place] = _checked(changed, (1, logits.shape[-1]), logits)[0]
            except Exception as error:
                failures[int(self.index[number])] = _failure(self.name, error)
        return failures


class _Called(NamedTuple):
    """A position whose request brings callables."""

    calls: list[_Call]
    index: int
    place: int
    row: int
    num_prompt: int

    def apply(self, logits: Tensor, lengths: np.ndarray, tokens: Tensor) -> dict[int, str]:
        ids = tokens[self.row, : lengths[self.index]].tolist()
        prompt, generated = ids[: self.num_prompt], ids[self.num_prompt :]
        own = logits[self.place]
        for name, function, with_prompt in self.calls:
            arguments = ([*prompt], [*generated]) if with_prompt else ([*generated],)
            try:
                own = _checked(function(*arguments, own), logits.shape[-1:], logits)
            except Exception as error:
                return {self.index: _failure(name, error)}
        logits[self.place] = own
        return {}


class ProcessorColumns(NamedTuple):
    """Processors of a batch, and the positions that each of them changes."""

    groups: list[_Group]
    called: list[_Called]
    broken: dict[int, str]
    """By index, why a row cannot be run."""
    blamed: dict[int, str]
    """By index, what is said of other rows if no logit of theirs is finite."""
    places: dict[int, int]
    """By index, the place in the logits that are changed."""

    def apply(self, logits: Tensor, lengths: np.ndarray, tokens: Tensor) -> dict[int, str]:
        """Change logits float32 [m, vocab] in place; return by index why a request fails if it got no token.

        Requests whose processors raise have NaN logits afterwards. `lengths` int[n] is the number of tokens
        of each row that samples, `tokens` int32 [max_rows, max_len] are those of all rows.
        """
        failures = dict(self.broken)
        for part in (*self.groups, *self.called):
            failures |= part.apply(logits, lengths, tokens)
        for index in failures:
            logits[self.places[index]] = torch.nan
        return self.blamed | failures


def _checked(changed: Any, shape: Sequence[int], like: Tensor) -> Tensor:
    if not isinstance(changed, Tensor) or tuple(changed.shape) != tuple(shape):
        given = list(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
        raise TypeError(f"it must return the logits, a tensor {list(shape)}, and returned {given}")
    return changed.to(like)


def _failure(name: str, error: Exception) -> str:
    """Log what a processor raised, and return what its request is told."""
    logger.error("logits processor %s raised an error", name, exc_info=error)
    return f"logits processor {name} raised {type(error).__name__}: {error}"
