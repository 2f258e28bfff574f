"""Rotary frequencies and their tables."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from enginecore.worker.models.spec import RopeSpec


class RotaryTables(nn.Module):
    """The cosines and sines of all layers; layers that rotate alike share a table."""

    def __init__(self, ropes: Sequence[RopeSpec | None], positions: int) -> None:
        """`ropes` has the rotary embedding of each layer, `positions` is the length of the tables."""
        super().__init__()
        distinct: list[RopeSpec] = []
        self._of_layer: list[int | None] = []
        for rope in ropes:
            if rope is not None and rope not in distinct:
                distinct.append(rope)
            self._of_layer.append(None if rope is None else distinct.index(rope))
        self._distinct = distinct
        for index, rope in enumerate(distinct):
            if not _grows(rope, positions):
                table = torch.empty(positions, rope.dim, dtype=torch.float32)
                # torch's arithmetic on the device "meta" is Python that takes seconds to import.
                if not table.is_meta:
                    with torch.device("cpu"):
                        table.copy_(cos_sin_table(rope, positions))
                self.register_buffer(f"table{index}", table, persistent=False)
        self._positions = positions

    def dynamic_rows(self, positions: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return float32 [tokens, rotary_dim] for each rotation that goes by the sequence's length.

        `positions` is int64 [tokens]. `lengths` int64 [tokens] has the length of each token's sequence, for
        dynamic NTK scaling; without it each token is its sequence's last.
        """
        return tuple(
            dynamic_cos_sin(rope, positions, positions + 1 if lengths is None else lengths)
            for rope in self._distinct
            if _grows(rope, self._positions)
        )

    def forward(self, positions: Tensor, dynamic_rows: Sequence[Tensor]) -> list["Rotation | None"]:
        """Return the rotation of each layer at `positions` int64 [tokens]; None rotates nothing."""
        rows = iter(dynamic_rows)
        rotations = [
            Rotation(next(rows), None)
            if _grows(rope, self._positions)
            else Rotation(self.get_buffer(f"table{index}"), positions)
            for index, rope in enumerate(self._distinct)
        ]
        return [None if index is None else rotations[index] for index in self._of_layer]


class Rotation(NamedTuple):
    """How the queries and keys of a layer are rotated."""

    cos_sin: Tensor
    """float32 [rows, rotary_dim]: cosines, then sines."""
    positions: Tensor | None
    """int64 [tokens]: each token's row; None where row i is token i's."""


def _grows(rope: RopeSpec, positions: int) -> bool:
    """Whether sequences of up to `positions` tokens are rotated by their own length."""
    return rope.kind == "dynamic" and positions > rope.parameters["original_max_position_embeddings"]


def dynamic_cos_sin(rope: RopeSpec, positions: Tensor, lengths: Tensor) -> Tensor:
    """Return float32 [tokens, rope.dim], cosines then sines, in sequences of `lengths` int64 [tokens].

    Dynamic NTK scaling ("emozilla", 2023): the base grows with what a sequence has beyond the original.
    """
    factor, original = rope.parameters["factor"], rope.parameters["original_max_position_embeddings"]
    stretch = factor * lengths.clamp(min=original).float() / original - (factor - 1)
    base = rope.theta * stretch ** (rope.dim / (rope.dim - 2))
    exponents = torch.arange(0, rope.dim, 2, device=positions.device).float() / rope.dim
    angles = positions.float()[:, None] / base[:, None] ** exponents
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def cos_sin_table(spec: RopeSpec, positions: int) -> Tensor:
    """Return float32 [positions, spec.dim]: cosines in the first half, sines in the second."""
    frequencies = inverse_frequencies(spec, positions)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    scale = attention_scale(spec)
    return torch.cat([angles.cos() * scale, angles.sin() * scale], dim=-1)


def inverse_frequencies(spec: RopeSpec, positions: int) -> Tensor:
    """Return float32 [spec.dim / 2]: radians a position, after scaling.

    `positions` is the most that a sequence can have. LongRoPE (Ding et al.) has one set of factors for
    sequences up to the original length and one for longer ones, and keys in a cache cannot change sets when
    their sequence grows; so `positions` decides for all. See `dynamic_cos_sin` for dynamic NTK scaling.
    """
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.int64).float() / spec.dim
    frequencies = 1.0 / (spec.theta**exponents)
    settings = spec.parameters
    match spec.kind:
        case "linear":
            return frequencies / settings["factor"]
        case "factors":
            return frequencies / torch.tensor(settings["factors"], dtype=torch.float32)
        case "llama3":
            return _llama3(frequencies, spec)
        case "yarn":
            return _yarn(frequencies, spec)
        case "longrope":
            longer = positions > settings["original_max_position_embeddings"]
            factors = torch.tensor(settings["long_factor" if longer else "short_factor"], dtype=torch.float32)
            return frequencies / factors
    return frequencies


def attention_scale(spec: RopeSpec) -> float:
    """Return the factor on cosines and sines with which YaRN and LongRoPE sharpen attention; else 1."""
    settings = spec.parameters
    if spec.kind not in ("yarn", "longrope"):
        return 1.0
    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])
    factor = settings["factor"]
    if spec.kind == "longrope":
        original = settings["original_max_position_embeddings"]
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    mscale, all_dims = settings.get("mscale"), settings.get("mscale_all_dim")
    if mscale and all_dims:
        return _mscale(factor, mscale) / _mscale(factor, all_dims)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(frequencies: Tensor, spec: RopeSpec) -> Tensor:
    """Stretch long wavelengths by `factor`, keep short ones, and blend between (Llama 3.1)."""
    settings = spec.parameters
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    turns = settings["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / settings["factor"]


def _yarn(frequencies: Tensor, spec: RopeSpec) -> Tensor:
    """Interpolate channels that turn slowly, keep those that turn fast (Peng et al., YaRN)."""
    settings = spec.parameters
    length = settings["original_max_position_embeddings"]

    def channel(turns: float) -> float:
        return spec.dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low = channel(settings.get("beta_fast") or 32)
    high = channel(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    width = high - low or 0.001
    interpolate = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return interpolate * (frequencies / settings["factor"]) + (1 - interpolate) * frequencies
