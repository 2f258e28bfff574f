"""Paged attention on GPU and CPU, and the small operations around it."""

from pagedattn.activation import activation, gelu_and_mul, silu_and_mul
from pagedattn.attention import attend, write_kv
from pagedattn.backends import BackendUnavailable, Groups, Routing, backend_name
from pagedattn.batch import AttentionBatch, build_batch, find_shared_prefix
from pagedattn.bitmask import apply_token_bitmask
from pagedattn.capture import CaptureError, Program, capture, host_call
from pagedattn.copies import copy_blocks
from pagedattn.cuda_graphs import estimate_graph_bytes
from pagedattn.embedding import embedding
from pagedattn.experts import group_by_expert, grouped_linear, pack_experts, top_k_softmax, weighted_sum
from pagedattn.grouped import grouped_matmul
from pagedattn.layout import KVLayout, allocate
from pagedattn.linear import linear, pack_linear
from pagedattn.norm import layer_norm, rms_norm
from pagedattn.packed import PackedExperts, PackedWeight
from pagedattn.quantized import Quantization
from pagedattn.rotary import rotary
from pagedattn.sampling import NOT_FINITE, top_k_top_p_sample

__all__ = [
    "NOT_FINITE",
    "AttentionBatch",
    "BackendUnavailable",
    "CaptureError",
    "Groups",
    "KVLayout",
    "PackedExperts",
    "PackedWeight",
    "Program",
    "Quantization",
    "Routing",
    "activation",
    "allocate",
    "apply_token_bitmask",
    "attend",
    "backend_name",
    "build_batch",
    "capture",
    "copy_blocks",
    "embedding",
    "estimate_graph_bytes",
    "find_shared_prefix",
    "gelu_and_mul",
    "group_by_expert",
    "grouped_linear",
    "grouped_matmul",
    "host_call",
    "layer_norm",
    "linear",
    "pack_experts",
    "pack_linear",
    "rms_norm",
    "rotary",
    "silu_and_mul",
    "top_k_softmax",
    "top_k_top_p_sample",
    "weighted_sum",
    "write_kv",
]
