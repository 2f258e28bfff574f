"""Paged attention on GPU and CPU, and the small operations around it."""

from pagedattn.activation import gelu_and_mul, silu_and_mul
from pagedattn.attention import attend, write_kv
from pagedattn.backends import BackendUnavailable, backend_name
from pagedattn.batch import AttentionBatch, build_batch, find_shared_prefix
from pagedattn.layout import KVLayout, allocate
from pagedattn.norm import rms_norm
from pagedattn.rotary import rotary

__all__ = [
    "AttentionBatch",
    "BackendUnavailable",
    "KVLayout",
    "allocate",
    "attend",
    "backend_name",
    "build_batch",
    "find_shared_prefix",
    "gelu_and_mul",
    "rms_norm",
    "rotary",
    "silu_and_mul",
    "write_kv",
]
