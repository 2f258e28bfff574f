"""Quantisation of weights and rows: integer codes times a scale; zero stays zero."""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

import torch
from torch.nn import functional as F

Quantization = Literal["int8", "int8-dynamic", "int4"]
GROUP_SIZES = (32, 64, 128)
MOST_DYNAMIC_INPUTS = 1 << 17
"""Inputs whose products of two int8 certainly have a sum that is an int32."""

INT4_VALUES = (-127, -101, -82, -65, -50, -37, -24, -12, 0, 13, 27, 41, 55, 71, 90, 112)
"""What the codes of int4 stand for, times the scale of their group.

Levels of Lloyd's algorithm (Lloyd 1982) for groups of 32 normal values, each scaled for the least squared
error, with one level at zero. bfloat16 holds them exactly.
"""

_STRETCHES = (-133.0, -127.0, -119.0, 112.0)
"""Values that the extreme of a group is tried at before its scale is chosen; -133 cuts it."""

_PART = 1 << 20
"""Weights that are quantised together, which stay in a cache."""

_LEAST_MAGNITUDE = 1e-36


class Codes(NamedTuple):
    """int8 codes `[..., inputs]` and scales `[..., groups]`, each of `group` inputs."""

    codes: torch.Tensor
    scales: torch.Tensor
    group: int

    def values(self) -> torch.Tensor:
        """Return what the codes stand for, in float32."""
        inputs = self.codes.shape[-1]
        scales = self.scales.float().repeat_interleave(self.group, -1)[..., :inputs]
        return self.codes * scales


def quantize_weight(weight: torch.Tensor, quantization: Quantization, group: int) -> Codes:
    """Quantise a weight `[outputs, inputs]`.

    int8 has a float32 scale for each output, max|w| / 127. int4 has one in bfloat16 for each group of inputs,
    of some the one with the least squared error.

    Raises ValueError for a weight that is not finite.
    """
    weight = weight.float()
    if not weight.isfinite().all():
        raise ValueError("a weight with values that are not finite cannot be quantised")
    outputs, inputs = weight.shape
    groups = -(-inputs // group)
    grouped = F.pad(weight, (0, groups * group - inputs)).view(outputs, groups, group)
    if quantization == "int4":
        codes = torch.empty(grouped.shape, dtype=torch.int8, device=weight.device)
        scales = torch.empty(grouped.shape[:2], dtype=torch.bfloat16, device=weight.device)
        rows = max(_PART // max(groups * group, 1), 1)
        for part, to, its in zip(grouped.split(rows), codes.split(rows), scales.split(rows), strict=True):
            _quantize_groups(part, to, its)
    else:
        scales = grouped.abs().amax(-1) / 127
        steps = scales.masked_fill(scales == 0, 1.0)[..., None]
        codes = (grouped / steps).round_().clamp_(-127, 127).to(torch.int8)
    return Codes(codes.flatten(1)[:, :inputs], scales, group)


def _quantize_groups(grouped: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Write int4 codes and scales of `grouped` `[outputs, groups, group]`.

    Each way to place the extreme gives codes, these a scale by least squares, and that its codes.
    """
    magnitude, place = grouped.abs().max(-1, keepdim=True)
    magnitude = magnitude.masked_fill(magnitude == 0, 1.0)
    extreme, unit = grouped.gather(-1, place), grouped / magnitude
    least = torch.full_like(magnitude, torch.inf)
    for stretch in _STRETCHES:
        tried = _nearest(grouped, extreme / stretch)
        squares = tried.square().sum(-1, keepdim=True)
        scale = (tried * unit).sum(-1, keepdim=True) / squares.masked_fill(squares == 0, torch.inf)
        scale = (scale * magnitude).bfloat16()
        tried = _nearest(grouped, scale.float())
        error = (tried * (scale / magnitude) - unit).square_().sum(-1, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        codes.copy_(torch.where(better, tried.to(torch.int8), codes))
        scales.copy_(torch.where(better, scale, scales[..., None])[..., 0])


def _nearest(grouped: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the int4 values, in float32, that are nearest to what is `grouped` over its scale."""
    steps = (grouped / scale.masked_fill(scale == 0, torch.inf)).round_().clamp_(-127, 127)
    return _nearest_values(grouped.device)[steps.add_(127).to(torch.int32)]


@cache
def _nearest_values(device: torch.device) -> torch.Tensor:
    """Return the nearest int4 value of each integer from -127 to 127."""
    values = torch.tensor(INT4_VALUES, dtype=torch.float32, device=device)
    integers = torch.arange(-127, 128, device=device)
    return values[(integers[:, None] - values).abs().argmin(-1)]


def quantize_rows(x: torch.Tensor) -> Codes:
    """Quantise rows `[..., inputs]` to int8, each by a float32 scale, max|x| / 127.

    A row that holds a value that is not finite has the scale NaN, one below 1e-36 throughout is 0.
    """
    x = x.float()
    highest = x.abs().amax(-1, keepdim=True)
    zero = highest < _LEAST_MAGNITUDE
    finite = highest < torch.inf
    most = torch.full_like(highest, 127)  # a number over a tensor is a product with its rounded reciprocal
    scales = (highest / most).masked_fill(zero, 0.0).masked_fill(~finite, torch.nan)
    factors = (most / highest).masked_fill(zero | ~finite, 0.0)
    # Products of two float32 are exact in float64, as in the kernels' multiply-add.
    codes = (x.double() * factors.double()).nan_to_num().round().to(torch.int8)
    return Codes(codes, scales, x.shape[-1])


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes of `INT4_VALUES` `[..., n]` (int8, n even) as bytes `[..., n / 2]`.

    The first of two is in the low half. A byte has the numbers of two values, counted on from that of zero.
    """
    numbers = torch.zeros(256, dtype=torch.uint8)
    for number, value in enumerate(INT4_VALUES):
        numbers[value] = (number - _ZERO) % 16
    bits = numbers[codes.view(torch.uint8).to(torch.int32)]
    return bits[..., 0::2] | bits[..., 1::2] << 4


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Undo `pack_nibbles`."""
    values = torch.tensor(INT4_VALUES[_ZERO:] + INT4_VALUES[:_ZERO], dtype=torch.int8)
    pairs = torch.stack((packed & 15, packed >> 4), -1)
    return values[pairs.to(torch.int32)].flatten(-2)


_ZERO = INT4_VALUES.index(0)
