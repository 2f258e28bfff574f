"""Arguments of the C kernels; the structures are those of kernels/*.h and *.c."""

from __future__ import annotations

import ctypes
from struct import Struct
from typing import Any

import torch

# The numbers that vectors.h gives element types.
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float8_e4m3fn: 3}

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class AttendArguments(ctypes.Structure):
    """`Call` of call.h."""

    _fields_ = [
        *_fields(_POINTER, "query cache out query_starts lengths block_table slopes sinks kv_scales"),
        *_fields(_LONG, "query_stride query_head_stride out_stride out_head_stride table_stride"),
        *_fields(_INT, "num_seqs num_decodes num_tokens q_heads kv_heads head_dim block_size"),
        *_fields(_INT, "shared_prefix window type cache_type threads"),
        *_fields(_FLOAT, "scale soft_cap"),
    ]


class WriteArguments(ctypes.Structure):
    """`WriteCall` of write.c."""

    _fields_ = [
        *_fields(_POINTER, "key value cache slots kv_scales"),
        *_fields(_LONG, "key_stride key_head_stride value_stride value_head_stride num_slots"),
        *_fields(_INT, "num_tokens kv_heads head_dim block_size type cache_type threads"),
    ]


# Calls that come by the hundred each step are packed, which takes a third of the time that filling in a
# ctypes structure does: P is a pointer, q an int64, i an int32, f a float, laid out as C does.
NORM = Struct("5P 5q 3i f")
"""`NormCall` of norm.c."""

GATE = Struct("2P 3q 3i")
"""`GateCall` of activation.c."""

ROTARY = Struct("6P 7q 7i")
"""`RotaryCall` of rotary.c."""

LINEAR = Struct("5P 5q 4i")
"""`LinearCall` of linear.c."""

SAMPLE = Struct("8P 3q 2i")
"""`SampleCall` of sample.c."""


def address(tensor: torch.Tensor | None) -> int | None:
    """Address of a tensor's elements; None for None."""
    return None if tensor is None else tensor.data_ptr()


def float32(per_head: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor as contiguous float32."""
    return None if per_head is None else per_head.to(torch.float32).contiguous()


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with its last dimension contiguous, which the kernels take for granted."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
