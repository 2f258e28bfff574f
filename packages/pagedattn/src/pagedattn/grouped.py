"""Matrix products of rows that are grouped by which matrix they meet."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from pagedattn.backends import backend_name


def grouped_matmul(
    x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor, *, backend: str | None = None
) -> torch.Tensor:
    """Each expert's rows times its own matrix: rows starts[e] to starts[e + 1] of x times weight[e]ᵀ.

    `x` is `[rows, in]`, sorted by expert, `weight` `[experts, out, in]` of its dtype, `starts` int32
    `[experts + 1]` from 0 to rows, not decreasing; an expert may have no rows. Returns `[rows, out]`.
    Raises ValueError when shapes, dtypes or devices do not fit together or the back end's name is unknown.
    """
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            "x must be [rows, in] and weight [experts, out, in], "
            f"not {list(x.shape)} and {list(weight.shape)}"
        )
    if starts.shape != (weight.shape[0] + 1,) or starts.dtype != torch.int32:
        raise ValueError(
            f"starts must be int32 [{weight.shape[0] + 1}], not {starts.dtype} {list(starts.shape)}"
        )
    if x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype}, weight {weight.dtype}")
    if not x.device == weight.device == starts.device:
        raise ValueError(f"x is on {x.device}, weight on {weight.device}, starts on {starts.device}")
    backend_name(x.device, backend)
    bounds = starts.tolist()
    out = x.new_empty(x.shape[0], weight.shape[1])
    for expert, (start, stop) in enumerate(pairwise(bounds)):
        if stop > start:
            out[start:stop] = F.linear(x[start:stop], weight[expert])
    return out
