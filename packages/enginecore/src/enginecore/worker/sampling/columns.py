"""Sampling settings of a batch as columns on its device, made when rows change and not each step."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from enginecore.worker.sampling.constraints import ConstraintColumns
from enginecore.worker.sampling.penalties import PenaltyColumns
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
    """Whether constraints or penalties change their logits, which are widened to float32 for it."""
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


class SamplingColumns(NamedTuple):
    """All settings of a batch of n rows. Rows that use no constraint or penalty are in none of theirs."""

    parts: list[Part]
    """One, or the rows whose logits are not changed and those whose are."""
    order: Tensor | None
    """int64 [n]: where each row is in the parts one after the other; None for one part."""
    constraints: ConstraintColumns | None
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

        Logits are changed of the rows in `changed` bool[n]: those with penalties or constraints that apply.
        """
        widths = state.logprobs[rows]
        asked = widths > -2
        # Logprobs are those of the logits before they are changed.
        in_place = dtype == torch.float32 and not asked.any()
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
        distinct = np.unique(widths[asked]).tolist()
        groups = [np.flatnonzero(widths == width) for width in distinct]
        alike = len(groups) == 1 and asked.all()
        uploaded = [None] if alike else upload_integers(groups, device)
        return cls(
            parts,
            order,
            _constraints(state, rows, changed, places, device),
            _penalties(state, rows, places, device),
            [LogprobGroup(*group) for group in zip(groups, uploaded, distinct, strict=True)],
        )


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
