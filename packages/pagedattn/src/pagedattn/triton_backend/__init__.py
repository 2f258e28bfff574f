"""The operations of pagedattn on CUDA devices, in Triton."""

from __future__ import annotations

from functools import partial

from pagedattn.torch_backend.activation import activation
from pagedattn.torch_backend.embedding import embedding
from pagedattn.torch_backend.experts import (
    group_by_expert,
    multiply_groups,
    top_k_softmax,
    weighted_sum,
)
from pagedattn.torch_backend.norm import layer_norm
from pagedattn.triton_backend.attention import attend, write_kv
from pagedattn.triton_backend.bitmask import apply_token_bitmask
from pagedattn.triton_backend.copies import copy_blocks
from pagedattn.triton_backend.gated import gelu_and_mul, silu_and_mul
from pagedattn.triton_backend.grouped import grouped_matmul
from pagedattn.triton_backend.linear import linear, linear_panel
from pagedattn.triton_backend.norm import rms_norm
from pagedattn.triton_backend.rotary import rotary
from pagedattn.triton_backend.sampling import top_k_top_p_sample

__all__ = [
    "activation",
    "apply_token_bitmask",
    "attend",
    "copy_blocks",
    "embedding",
    "gelu_and_mul",
    "group_by_expert",
    "grouped_linear",
    "grouped_matmul",
    "layer_norm",
    "linear",
    "linear_panel",
    "rms_norm",
    "rotary",
    "silu_and_mul",
    "top_k_softmax",
    "top_k_top_p_sample",
    "weighted_sum",
    "write_kv",
]

grouped_linear = partial(multiply_groups, grouped_matmul)
"""See `pagedattn.grouped_linear`."""
