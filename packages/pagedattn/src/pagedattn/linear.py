"""Linear layers over weights that are packed once."""

from __future__ import annotations

import torch

from pagedattn.backends import backend_of
from pagedattn.packed import PackedWeight, pack


def pack_linear(
    weight: torch.Tensor, dtype: torch.dtype | None = None, *, backend: str | None = None
) -> PackedWeight:
    """Lay a weight `[outputs, inputs]` out, once, for `linear`; stored as `dtype`, by default its own.

    A weight of bfloat16 or float16 stays as it is and is widened in registers: products with float32 rows are
    those of float32, and half the memory is read. `dtype` rounds where it is narrower than the weight's.

    Raises ValueError when the weight has not two dimensions, or a dtype is not float32, float16, bfloat16 or
    float64.
    """
    dtype = weight.dtype if dtype is None else dtype
    if weight.ndim != 2:
        raise ValueError(f"weight must be [outputs, inputs], not {list(weight.shape)}")
    for given in (weight.dtype, dtype):
        if not given.is_floating_point or given.itemsize < 2:
            raise ValueError(f"weights are float32, float16, bfloat16 or float64, not {given}")
    return pack(weight.detach(), dtype, backend_of(weight.device, backend).linear_panel(dtype))


def linear(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """x · weightᵀ + bias, summed in float32 and rounded once to x's dtype.

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
