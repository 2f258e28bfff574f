"""Linear layers by C kernels over packed weights."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from pagedattn import torch_backend
from pagedattn.cpu_backend.arguments import LINEAR, TYPES, address, dense, function, launch
from pagedattn.cpu_backend.ops import FLOATS
from pagedattn.packed import PackedExperts, PackedWeight
from pagedattn.quantized import Quantization

# Words of a row are packed by so many, see kernels/product.h; a single row goes as it is if it is that long.
CHUNK = 16

# The numbers that product.h gives quantised weights.
_QUANTIZED: dict[Quantization, int] = {"int8": 4, "int8-dynamic": 5, "int4": 6}


def linear_panel(dtype: torch.dtype, quantization: Quantization | None) -> int:
    """Return the columns of a panel that the kernels multiply at a time; 0 for a dtype they do not know."""
    return _widest_panel() if dtype in FLOATS or quantization else 0


@cache
def _widest_panel() -> int:
    return function("octavo_linear_panel", ctypes.c_int32)()


def weight_type(weight: PackedWeight | PackedExperts) -> int:
    """Return the number that product.h gives the way a weight is stored."""
    return TYPES[weight.dtype] if weight.quantization is None else _QUANTIZED[weight.quantization]


def linear(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """See `pagedattn.linear`. Dtypes that the kernels do not know, and plain weights, go to torch."""
    if x.dtype not in FLOATS or not weight.panel:
        return torch_backend.linear(x, weight, bias, out)
    outputs, inputs = weight.outputs, weight.inputs
    if out is None:
        out = x.new_empty((*x.shape[:-1], outputs))
    if not out.numel():
        return out
    rows = dense(x if x.ndim == 2 else x.reshape(-1, inputs))
    tokens = rows.shape[0]
    result = out.view(tokens, outputs) if out.ndim != 2 and out.is_contiguous() else out
    if result.ndim != 2 or result.stride(1) != 1:
        result = out.new_empty((tokens, outputs))
    packed = None
    in_place = tokens == 1 and x.dtype == torch.float32 and inputs % CHUNK == 0
    if not in_place or weight.quantization == "int8-dynamic":
        packed = torch.empty(tokens * (inputs + CHUNK), dtype=torch.float32)
    if bias is not None:
        bias = bias.contiguous()
    launch(
        LINEAR,
        rows.data_ptr(),
        weight.data.data_ptr(),
        address(weight.scales),
        address(weight.column_sums),
        address(bias),
        result.data_ptr(),
        address(packed),
        0,
        rows.stride(0),
        result.stride(0),
        tokens,
        inputs,
        outputs,
        weight.group,
        TYPES[x.dtype],
        weight_type(weight),
        0 if bias is None else TYPES[bias.dtype],
        torch.get_num_threads(),
    )
    if result.data_ptr() != out.data_ptr():
        out.copy_(result.view(out.shape))
    return out
