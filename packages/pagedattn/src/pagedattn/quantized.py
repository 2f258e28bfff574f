"""Symmetric quantisation of weights and rows: integer codes times a scale."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch.nn import functional as F

Quantization = Literal["int8", "int8-dynamic", "int4"]
GROUP_SIZES = (32, 64, 128)
MOST_DYNAMIC_INPUTS = 1 << 17
"""Inputs whose products of two int8 certainly have a sum that is an int32."""

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
    chosen so that the value of highest magnitude becomes -8, as in llama.cpp's Q4_0.

    Raises ValueError for a weight that is not finite.
    """
    weight = weight.float()
    if not weight.isfinite().all():
        raise ValueError("a weight with values that are not finite cannot be quantised")
    outputs, inputs = weight.shape
    groups = -(-inputs // group)
    grouped = F.pad(weight, (0, groups * group - inputs)).view(outputs, groups, group)
    if quantization == "int4":
        extreme = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))[..., 0]
        scales = (extreme / -8).bfloat16()
        low, high = -8, 7
    else:
        scales = grouped.abs().amax(-1) / 127
        low, high = -127, 127
    steps = scales.float().masked_fill(scales == 0, 1.0)[..., None]
    codes = (grouped / steps).round_().clamp_(low, high).to(torch.int8)
    return Codes(codes.flatten(1)[:, :inputs], scales, group)


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
    """Pack codes -8 to 7 `[..., n]` (int8, n even) as bytes `[..., n / 2]`, the first in the low half."""
    bits = codes.view(torch.uint8) & 15
    return bits[..., 0::2] | bits[..., 1::2] << 4


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Undo `pack_nibbles`."""
    pairs = torch.stack((packed << 4, packed), -1).view(torch.int8) >> 4
    return pairs.flatten(-2)
