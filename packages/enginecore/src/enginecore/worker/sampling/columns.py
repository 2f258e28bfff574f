"""Sampling settings of a batch as columns on its device, made when rows change and not each step."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from enginecore.worker.sampling.constraints import ConstraintColumns
from enginecore.worker.sampling.penalties import PenaltyColumns
from enginecore.worker.sampling.processors import ProcessorColumns
from enginecore.worker.upload import upload_floats, upload_integers

if TYPE_CHECKING:
    from enginecore.worker.sampling.state import SamplingState


class DrawSettings(NamedTuple):
    """Settings of `top_k_top_p_sample`, [m] each."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor


class Part(NamedTuple):
    """Rows of a batch whose logits are drawn from together."""

    members: np.ndarray | None
    """int64 [m], ascending: the rows; None for all."""
    rows: Tensor | None
    """The same on the device."""
    changed: bool
    """Whether constraints, processors or penalties change their logits, which are float32 for it."""
    settings: DrawSettings | None
    """None where the likeliest token is taken of each row, by a device's own argmax."""


class LogprobGroup(NamedTuple):
    """Rows of a batch that want the log probabilities of as many candidates."""

    index: np.ndarray
    """int64 [g]."""
    rows: Tensor | None
    """The same on the device; None for all rows."""
    width: int
    """-1 for the whole vocabulary."""
    candidates: Tensor | None
    """int64 [g, width] where they ask for certain ones; None for the likeliest."""


class SamplingColumns(NamedTuple):
    """All settings of a batch of n rows.

    Rows that use no constraint, processor or penalty are in none of theirs.
    """

    parts: list[Part]
    """One, or the rows whose logits are not changed and those whose are."""
    order: Tensor | None
    """int64 [n]: where each row is in the parts one after the other; None for one part."""
    constraints: ConstraintColumns | None
    processors: ProcessorColumns | None
    penalties: PenaltyColumns | None
    logprobs: list[LogprobGroup]

    @classmethod
    def make(
        cls,
        state: "SamplingState",
        rows: np.ndarray,
        changed: np.ndarray,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "SamplingColumns":
        """Make the columns of `rows` int[n] for logits of `dtype`.

        Logits are changed of the rows in `changed` bool[n]: those with penalties, with processors, or with
        constraints that apply.
        """
        # Logprobs are those of the logits before they are changed.
        in_place = dtype == torch.float32 and not (state.logprobs[rows] > -2).any()
        whole = in_place or changed.all() or not changed.any()
        members = [np.arange(len(rows))] if whole else [np.flatnonzero(~changed), np.flatnonzero(changed)]
        indices = [None] if whole else upload_integers(members, device)
        parts = [
            Part(
                None if index is None else held,
                index,
                bool(changed[held].any()),
                _settings(state, rows[held], device),
            )
            for held, index in zip(members, indices, strict=True)
        ]
        order = None if whole else upload_integers([np.argsort(np.concatenate(members))], device)[0]
        places = np.arange(len(rows)) if whole else np.cumsum(changed) - 1
        return cls(
            parts,
            order,
            _constraints(state, rows, changed, places, device),
            _processors(state, rows, places, device),
            _penalties(state, rows, places, device),
            _logprob_groups(state, rows, device),
        )


def _logprob_groups(state: "SamplingState", rows: np.ndarray, device: torch.device) -> list[LogprobGroup]:
    widths = state.logprobs[rows]
    named = np.isin(rows, list(state.logprob_ids))
    asked = sorted({*zip(widths.tolist(), named.tolist(), strict=True)} - {(-2, False)})
    groups = [np.flatnonzero((widths == width) & (named == by_id)) for width, by_id in asked]
    alike = len(groups) == 1 and len(groups[0]) == len(rows)
    uploaded = [None] if alike else upload_integers(groups, device)
    found = []
    for (width, by_id), index, on_device in zip(asked, groups, uploaded, strict=True):
        candidates = None
        if by_id:
            ids = np.concatenate([state.logprob_ids[row] for row in rows[index].tolist()])
            candidates = upload_integers([ids], device)[0].view(len(index), width)
        found.append(LogprobGroup(index, on_device, width, candidates))
    return found


def _settings(state: "SamplingState", rows: np.ndarray, device: torch.device) -> DrawSettings | None:
    temperature = state.floats["temperature"][rows]
    # On a CPU the sampler's own argmax is five times as fast as torch's.
    if device.type != "cpu" and not temperature.any():
        return None
    floats = [temperature, state.floats["top_p"][rows], state.floats["min_p"][rows]]
    temperatures, top_p, min_p = upload_floats(floats, device)
    top_k, seeds = upload_integers([state.top_k[rows], state.seed[rows].view(np.int64)], device)
    return DrawSettings(temperatures, top_k.to(torch.int32), top_p, min_p, seeds)


def _constraints(
    state: "SamplingState", rows: np.ndarray, changed: np.ndarray, places: np.ndarray, device: torch.device
) -> ConstraintColumns | None:
    index = np.flatnonzero(changed & (state.constrained_until[rows] > 0))
    if not len(index):
        return None
    picked = rows[index]
    parts = [state.constraints[row] for row in picked.tolist()]
    return ConstraintColumns.join(parts, index, places[index], picked, state.num_prompt[picked], device)


def _processors(
    state: "SamplingState", rows: np.ndarray, places: np.ndarray, device: torch.device
) -> ProcessorColumns | None:
    index = np.flatnonzero(state.processed[rows])
    if not len(index):
        return None
    picked = rows[index]
    return state.processors.columns(picked, index, places[index], state.num_prompt[picked], device)


def _penalties(
    state: "SamplingState", rows: np.ndarray, places: np.ndarray, device: torch.device
) -> PenaltyColumns | None:
    index = np.flatnonzero(state.penalised[rows])
    if not len(index):
        return None
    picked = rows[index]
    penalties = [
        state.floats[name][picked] for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
    ]
    return PenaltyColumns.make(index, places[index], picked, state.num_prompt[picked], penalties, device)
