"""Linear layers over weights that are packed once."""

from __future__ import annotations

from typing import get_args

import torch

from pagedattn.backends import backend_of
from pagedattn.packed import PackedWeight, pack, pack_codes
from pagedattn.quantized import GROUP_SIZES, MOST_DYNAMIC_INPUTS, Quantization, quantize_weight


def pack_linear(
    weight: torch.Tensor,
    dtype: torch.dtype | None = None,
    *,
    quantization: Quantization | None = None,
    group_size: int | None = None,
    backend: str | None = None,
) -> PackedWeight:
    """Lay a weight `[outputs, inputs]` out, once, for `linear`; stored as `dtype`, by default its own.

    A weight of bfloat16 or float16 stays as it is and is widened in registers: products with float32 rows are
    those of float32, and half the memory is read. `dtype` rounds where it is narrower than the weight's.

    `quantization` stores integers instead:

    - `int8`: a scale for each output; `linear` widens them and multiplies in float32, or on CPUs that have
      instructions for it in pairs of bfloat16, where rows are bfloat16.
    - `int8-dynamic`: the same weight; `linear` also rounds each row of x to int8, by its highest magnitude,
      and multiplies integers. A row with a value that is not finite gives NaN.
    - `int4`: one of 16 unevenly spaced values (`INT4_VALUES`), with a scale in bfloat16 for each `group_size`
      inputs (32, 64 or 128; by default 32) of an output; `linear` multiplies as for int8.

    Raises ValueError when the weight has not two dimensions, a dtype is not float32, float16, bfloat16 or
    float64, the back end does not know the quantisation, or it cannot be had of this weight.
    """
    if weight.ndim != 2:
        raise ValueError(f"weight must be [outputs, inputs], not {list(weight.shape)}")
    for given in (weight.dtype, weight.dtype if dtype is None else dtype):
        if not given.is_floating_point or given.itemsize < 2:
            raise ValueError(f"weights are float32, float16, bfloat16 or float64, not {given}")
    back_end = backend_of(weight.device, backend)
    if quantization is None:
        if group_size is not None:
            raise ValueError(f"group_size {group_size} goes with quantization='int4'")
        dtype = weight.dtype if dtype is None else dtype
        return pack(weight.detach(), dtype, back_end.linear_panel(dtype, None))
    if dtype is not None:
        raise ValueError(f"a weight is stored as {dtype} or quantised to {quantization}, not both")
    inputs = weight.shape[1]
    group = _group(quantization, inputs, group_size)
    panel = back_end.linear_panel(weight.dtype, quantization)
    return pack_codes(quantize_weight(weight.detach(), quantization, group), quantization, panel)


def _group(quantization: Quantization, inputs: int, group_size: int | None) -> int:
    """Return the inputs that a scale is for, or raise ValueError where there is no such quantisation."""
    if quantization not in get_args(Quantization):
        raise ValueError(f"quantization is one of {get_args(Quantization)}, not {quantization!r}")
    if quantization == "int4":
        group = 32 if group_size is None else group_size
        if group not in GROUP_SIZES:
            raise ValueError(f"group_size is one of {GROUP_SIZES}, not {group}")
        return group
    if group_size is not None:
        raise ValueError(f"{quantization} has a scale for each output, not for groups of {group_size} inputs")
    if quantization == "int8-dynamic" and inputs > MOST_DYNAMIC_INPUTS:
        raise ValueError(f"int8-dynamic sums up to {MOST_DYNAMIC_INPUTS} inputs, not {inputs}")
    return max(inputs, 1)


def linear(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """x · weightᵀ + bias, summed in float32 (int8-dynamic: int32) and rounded once to x's dtype.

    `x` is `[..., inputs]`, `bias` `[outputs]` of x's dtype or float32. Returns `[..., outputs]` of x's dtype,
    or writes `out` of that shape and dtype and returns it; `out` must not overlap `x`. Rows of both may be
    slices of wider ones. On the `cpu` back end each row's result depends, to the bit, on that row, the weight
    and the bias alone: not on the number of rows, on its neighbours or on the number of threads.

    Raises ValueError when shapes, dtypes or devices do not fit together.
    """
    shape = (*x.shape[:-1], weight.outputs)
    if not x.ndim or x.shape[-1] != weight.inputs:
        raise ValueError(f"x must be [..., {weight.inputs}], not {list(x.shape)}")
    if not x.dtype.is_floating_point or x.device != weight.device:
        raise ValueError(f"x is {x.dtype} on {x.device}, the weight {weight.dtype} on {weight.device}")
    if bias is not None:
        if bias.shape != (weight.outputs,) or bias.device != x.device:
            raise ValueError(
                f"bias must be [{weight.outputs}] on {x.device}, not {list(bias.shape)} on {bias.device}"
            )
        if bias.dtype not in (x.dtype, torch.float32):
            raise ValueError(f"bias must be {x.dtype} or torch.float32, not {bias.dtype}")
    if out is not None and (out.shape != shape or out.dtype != x.dtype or out.device != x.device):
        raise ValueError(
            f"out must be {list(shape)} {x.dtype} on {x.device}, "
            f"not {list(out.shape)} {out.dtype} on {out.device}"
        )
    return backend_of(x.device, backend).linear(x, weight, bias, out)
