"""Linear layers, which are torch's on CUDA devices."""

from __future__ import annotations

import torch

from pagedattn.quantized import Quantization
from pagedattn.torch_backend.linear import linear

__all__ = ["linear", "linear_panel"]


def linear_panel(dtype: torch.dtype, quantization: Quantization | None) -> int:
    """Return 0: a weight stays plain. Raises ValueError for a quantised one."""
    if quantization is not None:
        raise ValueError(f"the triton back end has no weights of {quantization}; the cpu back end has")
    return 0
