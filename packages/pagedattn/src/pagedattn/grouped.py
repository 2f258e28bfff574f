"""Matrix products of rows that are grouped by the expert they go to."""

from __future__ import annotations

import torch

from pagedattn.backends import backend_of

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def grouped_matmul(
    x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor, *, backend: str | None = None
) -> torch.Tensor:
    """x · weightᵀ with a weight of its own for each run of rows; `[rows, out]` of x's dtype.

    `x` is `[rows, in]`, `weight` `[experts, out, in]`, both float32, float16 or bfloat16; `starts` int32
    or int64 `[experts + 1]` rises from 0 to rows: expert e multiplies rows `starts[e]:starts[e + 1]`,
    of which there may be none. Sums are float32. On a device nothing waits for `starts`, and rows outside
    `starts[0]:starts[experts]` are left undefined.

    Raises ValueError when shapes, dtypes or devices do not fit together.
    """
    if x.ndim != 2 or weight.ndim != 3 or weight.shape[2] != x.shape[1]:
        raise ValueError(
            f"x must be [rows, in] and weight [experts, out, in], "
            f"not {list(x.shape)} and {list(weight.shape)}"
        )
    if starts.shape != (weight.shape[0] + 1,) or starts.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"starts must be int32 or int64 [{weight.shape[0] + 1}] for {weight.shape[0]} experts, "
            f"not {starts.dtype} {list(starts.shape)}"
        )
    if x.dtype not in _DTYPES or weight.dtype != x.dtype:
        raise ValueError(
            f"x and weight share float32, float16 or bfloat16; they are {x.dtype}, {weight.dtype}"
        )
    if not x.device == weight.device == starts.device:
        raise ValueError(f"x is on {x.device}, weight on {weight.device}, starts on {starts.device}")
    return backend_of(x.device, backend).grouped_matmul(x, weight, starts)
