"""Linear layers in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from pagedattn.packed import PackedWeight
from pagedattn.quantized import Quantization, quantize_rows


def linear_panel(dtype: torch.dtype, quantization: Quantization | None) -> int:
    """Return 0: a weight stays plain."""
    return 0


def linear(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """See `pagedattn.linear`. Mixed dtypes are multiplied in the widest, which is at least float32."""
    if weight.quantization == "int8-dynamic" and weight.inputs:
        result = _integers(x, weight, bias)
        return result if out is None else out.copy_(result)
    plain = weight.unpack()
    if plain.dtype == x.dtype and (bias is None or bias.dtype == x.dtype):
        result = F.linear(x, plain, bias)
    else:
        wide = torch.promote_types(torch.promote_types(x.dtype, plain.dtype), torch.float32)
        result = F.linear(x.to(wide), plain.to(wide), None if bias is None else bias.to(wide)).to(x.dtype)
    return result if out is None else out.copy_(result)


def _integers(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply int8 rows by int8 weights, in float64, which holds the integers."""
    rows, columns = quantize_rows(x), weight.codes()
    result = (rows.codes.double() @ columns.codes.double().T) * (rows.scales * columns.scales.float().T)
    return (result if bias is None else result + bias).to(x.dtype)
