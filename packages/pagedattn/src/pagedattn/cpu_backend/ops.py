"""The operations around attention by C kernels: each makes one pass over memory where torch makes several.

Dtypes that the kernels do not know (float64) go to the torch back end.
"""

from __future__ import annotations

from typing import Literal

import torch

from pagedattn import torch_backend
from pagedattn.backends import Activation
from pagedattn.cpu_backend.arguments import (
    ACTIVATION,
    LAYER_NORM,
    NORM,
    ROTARY,
    TYPES,
    address,
    dense,
    launch,
)

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}
"""The numbers of activation.c."""


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
    launch(
        NORM,
        x.data_ptr(),
        address(residual),
        weight.data_ptr(),
        out.data_ptr(),
        address(total),
        x.numel() // hidden,
        *strides,
        hidden,
        TYPES[x.dtype],
        TYPES[weight.dtype],
        torch.get_num_threads(),
        eps,
    )
    return out if total is None else (out, total)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `pagedattn.layer_norm`."""
    if x.dtype not in FLOATS or weight.dtype != x.dtype or bias.dtype != x.dtype or not x.numel():
        return torch_backend.layer_norm(x, weight, bias, eps, residual)
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    out, total = torch.empty_like(x), None if residual is None else torch.empty_like(x)
    launch(
        LAYER_NORM,
        x.data_ptr(),
        address(residual),
        weight.data_ptr(),
        bias.data_ptr(),
        out.data_ptr(),
        address(total),
        x.numel() // x.shape[-1],
        x.shape[-1],
        TYPES[x.dtype],
        torch.get_num_threads(),
        eps,
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
    error = launch(
        ROTARY,
        query.data_ptr(),
        key.data_ptr(),
        query_out.data_ptr(),
        key_out.data_ptr(),
        cos_sin.data_ptr(),
        address(positions),
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
    if error and positions is not None:
        raise rotary_error(error, positions, max_position)
    return query_out, key_out


def rotary_error(error: int, positions: torch.Tensor, max_position: int) -> IndexError:
    """Return what `launch` says of ROTARY."""
    token = error - 1
    return IndexError(
        f"token {token} has position {int(positions[token])}; cos_sin has rows for 0 to {max_position - 1}"
    )


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See `pagedattn.silu_and_mul`."""
    return _activate(x, "silu", gated=True) if x.dtype in FLOATS else torch_backend.silu_and_mul(x)


def gelu_and_mul(x: torch.Tensor, approximate: Literal["tanh", "none"]) -> torch.Tensor:
    """See `pagedattn.gelu_and_mul`."""
    if x.dtype not in FLOATS:
        return torch_backend.gelu_and_mul(x, approximate)
    return _activate(x, "gelu_tanh" if approximate == "tanh" else "gelu", gated=True)


def activation(x: torch.Tensor, kind: Activation) -> torch.Tensor:
    """See `pagedattn.activation`."""
    return _activate(x, kind, gated=False) if x.dtype in FLOATS else torch_backend.activation(x, kind)


def _activate(x: torch.Tensor, kind: Activation, *, gated: bool) -> torch.Tensor:
    """The activation of x, or of its first half, times its second."""
    if not x.is_contiguous():
        x = dense(x) if x.ndim == 2 else x.contiguous()
    *leading, given = x.shape
    width = given // 2 if gated else given
    out = x.new_empty((*leading, width))
    launch(
        ACTIVATION,
        x.data_ptr(),
        out.data_ptr(),
        out.numel() // width if width else 0,
        width,
        x.stride(0) if x.ndim == 2 else given,
        _ACTIVATIONS[kind],
        gated,
        TYPES[x.dtype],
        torch.get_num_threads(),
    )
    return out
