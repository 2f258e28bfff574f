"""Linear layers in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from pagedattn.packed import PackedWeight


def linear_panel(dtype: torch.dtype) -> int:
    """Return 0: a weight stays plain."""
    return 0


def linear(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """See `pagedattn.linear`. Mixed dtypes are multiplied in the widest, which is at least float32."""
    plain = weight.unpack()
    if plain.dtype == x.dtype and (bias is None or bias.dtype == x.dtype):
        result = F.linear(x, plain, bias)
    else:
        wide = torch.promote_types(torch.promote_types(x.dtype, plain.dtype), torch.float32)
        result = F.linear(x.to(wide), plain.to(wide), None if bias is None else bias.to(wide)).to(x.dtype)
    return result if out is None else out.copy_(result)
