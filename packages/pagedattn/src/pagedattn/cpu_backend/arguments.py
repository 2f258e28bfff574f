"""The C kernels, their arguments and how one is run; the structures are those of kernels/*.h and *.c."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from struct import Struct
from typing import Any, NamedTuple

import torch

from pagedattn.capture import recorder
from pagedattn.cpu_backend.build import load_library

# The numbers that vectors.h gives element types.
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float8_e4m3fn: 3}


class Kernel(NamedTuple):
    """A C kernel: its number in program.c, and the structure of its arguments as C lays it out.

    In the structure P is a pointer, q an int64, i an int32, f a float. Packing takes a third of the time that
    filling in a ctypes structure does.
    """

    number: int
    arguments: Struct


NORM = Kernel(0, Struct("5P 5q 3i f"))
"""`NormCall` of norm.c."""

LAYER_NORM = Kernel(1, Struct("6P 2q 2i f"))
"""`LayerNormCall` of layer_norm.c."""

ROTARY = Kernel(2, Struct("6P 7q 7i"))
"""`RotaryCall` of rotary.c."""

ACTIVATION = Kernel(3, Struct("2P 3q 4i"))
"""`ActivationCall` of activation.c."""

WRITE = Kernel(4, Struct("5P 5q 7i"))
"""`WriteCall` of write.c."""

ATTEND = Kernel(5, Struct("10P 7q 13i 2f"))
"""`Call` of call.h."""

LINEAR = Kernel(6, Struct("8P 6q 4i"))
"""`LinearCall` of linear.h."""

TOP_K = Kernel(7, Struct("3P 4q 3i"))
"""`TopKCall` of experts.c."""

GROUP = Kernel(8, Struct("5P 3q"))
"""`GroupCall` of experts.c."""

GROUPED_LINEAR = Kernel(9, Struct("8P 10q 3i"))
"""`GroupedCall` of grouped.c."""

WEIGHTED_SUM = Kernel(10, Struct("4P 5q 2i"))
"""`SumCall` of experts.c."""

EMBEDDING = Kernel(11, Struct("5P 5q 6i f"))
"""`EmbeddingCall` of embedding.c."""

BITMASK = Struct("3P 4q 2i")
"""`BitmaskCall` of bitmask.c."""

SAMPLE = Struct("8P 3q 2i")
"""`SampleCall` of sample.c."""


def launch(kernel: Kernel, *values: float) -> int:
    """Run a kernel; return 0, or why it did not run: its own number of an error, or -1 without memory.

    Where this thread records, the call becomes an operation of the program, and does not run now.
    """
    active = recorder.get()
    if active is not None:
        active.record_kernel(kernel, values)
        return 0
    return _octavo_run()(kernel.number, kernel.arguments.pack(*values))


@cache
def _octavo_run() -> Callable[[int, bytes], int]:
    return function("octavo_run", ctypes.c_int64, ctypes.c_int32, ctypes.c_char_p)


def address(tensor: torch.Tensor | None) -> int:
    """Address of a tensor's elements; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def function(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of the library with its types declared."""
    found = load_library()[name]
    found.argtypes, found.restype = arguments, result
    return found


def float32(per_head: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor as contiguous float32."""
    return None if per_head is None else per_head.to(torch.float32).contiguous()


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with its last dimension contiguous, which the kernels take for granted."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
