"""The operations around attention by C kernels: each makes one pass over memory where torch makes several.

Dtypes that the kernels do not know (float64) go to the torch back end.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Literal, NamedTuple

import torch

from pagedattn import torch_backend
from pagedattn.cpu_backend.arguments import GATE, NORM, ROTARY, TYPES, address, dense
from pagedattn.cpu_backend.build import load_library

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# The numbers that activation.c gives activations.
_SILU, _GELU = 0, {"tanh": 1, "none": 2}


class _Kernels(NamedTuple):
    """Functions of one packed structure."""

    rms_norm: Any
    rotary: Any
    gate: Any
    sample: Any
    linear: Any
    linear_panel: Any


@cache
def kernels() -> _Kernels:
    """The kernels around attention, ready to be called with bytes."""
    library = load_library()

    def function(name: str, result: Any, *arguments: Any) -> Any:
        found = library[name]
        found.argtypes, found.restype = arguments, result
        return found

    return _Kernels(
        rms_norm=function("octavo_rms_norm", None, ctypes.c_char_p),
        rotary=function("octavo_rotary", ctypes.c_int64, ctypes.c_char_p),
        gate=function("octavo_gate", None, ctypes.c_char_p),
        sample=function("octavo_sample", ctypes.c_int32, ctypes.c_char_p),
        linear=function("octavo_linear", None, ctypes.c_char_p),
        linear_panel=function("octavo_linear_panel", ctypes.c_int32),
    )


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `pagedattn.rms_norm`."""
    if x.dtype not in FLOATS or not x.numel():
        return torch_backend.rms_norm(x, weight, eps, residual)
    if weight.dtype != x.dtype and weight.dtype != torch.float32:
        weight = weight.float()
    weight = weight.contiguous()
    total = None
    if residual is not None:
        x, residual = x.contiguous(), residual.contiguous()
        total = torch.empty_like(x)
    hidden = x.shape[-1]
    if x.ndim not in (2, 3):
        x = x.contiguous()
    if x.is_contiguous():
        strides, out = (1, hidden, 0), torch.empty_like(x)
    else:
        x = dense(x)
        strides = (x.shape[1], *x.stride()[:2]) if x.ndim == 3 else (1, x.stride(0), 0)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    kernels().rms_norm(
        NORM.pack(
            x.data_ptr(),
            address(residual) or 0,
            weight.data_ptr(),
            out.data_ptr(),
            address(total) or 0,
            x.numel() // hidden,
            *strides,
            hidden,
            TYPES[x.dtype],
            TYPES[weight.dtype],
            torch.get_num_threads(),
            eps,
        )
    )
    return out if total is None else (out, total)


def rotary(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `pagedattn.rotary`. Raises IndexError for a position outside of `cos_sin`."""
    if query.dtype not in FLOATS or key.dtype != query.dtype or cos_sin.dtype == torch.float64:
        return torch_backend.rotary(query, key, positions, cos_sin, interleaved)
    if positions is not None:
        positions = positions.to(torch.int64).contiguous()
    if cos_sin.dtype != torch.float32:
        # The rows in use only: with `positions`, the table may be long.
        rows = cos_sin if positions is None else cos_sin.index_select(0, positions)
        cos_sin, positions = rows.float(), None
    query, key, cos_sin = dense(query), dense(key), dense(cos_sin)
    tokens, q_heads, head_dim = query.shape
    kv_heads = key.shape[1]
    query_out, key_out = (
        query.new_empty((tokens, q_heads, head_dim)),
        key.new_empty((tokens, kv_heads, head_dim)),
    )
    query_stride, query_head_stride, _ = query.stride()
    key_stride, key_head_stride, _ = key.stride()
    max_position, rotary_dim = cos_sin.shape
    token = kernels().rotary(
        ROTARY.pack(
            query.data_ptr(),
            key.data_ptr(),
            query_out.data_ptr(),
            key_out.data_ptr(),
            cos_sin.data_ptr(),
            address(positions) or 0,
            query_stride,
            query_head_stride,
            key_stride,
            key_head_stride,
            cos_sin.stride(0),
            tokens,
            max_position,
            q_heads,
            kv_heads,
            head_dim,
            rotary_dim,
            interleaved,
            TYPES[query.dtype],
            torch.get_num_threads(),
        )
    )
    if token >= 0 and positions is not None:
        raise IndexError(
            f"token {token} has position {int(positions[token])}; "
            f"cos_sin has rows for 0 to {max_position - 1}"
        )
    return query_out, key_out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See `pagedattn.silu_and_mul`."""
    return _gate(x, _SILU) if x.dtype in FLOATS else torch_backend.silu_and_mul(x)


def gelu_and_mul(x: torch.Tensor, approximate: Literal["tanh", "none"]) -> torch.Tensor:
    """See `pagedattn.gelu_and_mul`."""
    return _gate(x, _GELU[approximate]) if x.dtype in FLOATS else torch_backend.gelu_and_mul(x, approximate)


def _gate(x: torch.Tensor, kind: int) -> torch.Tensor:
    """The activation of x's first half, times its second."""
    if not x.is_contiguous():
        x = dense(x) if x.ndim == 2 else x.contiguous()
    *leading, both = x.shape
    width = both // 2
    out = x.new_empty((*leading, width))
    kernels().gate(
        GATE.pack(
            x.data_ptr(),
            out.data_ptr(),
            out.numel() // width if width else 0,
            width,
            x.stride(0) if x.ndim == 2 else both,
            kind,
            TYPES[x.dtype],
            torch.get_num_threads(),
        )
    )
    return out
