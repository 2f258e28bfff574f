"""Mixtures of experts by C kernels; dtypes that they do not know go to torch."""

from __future__ import annotations

import torch

from pagedattn import torch_backend
from pagedattn.backends import Groups, Routing
from pagedattn.cpu_backend.arguments import (
    GROUP,
    GROUPED_LINEAR,
    TOP_K,
    TYPES,
    WEIGHTED_SUM,
    address,
    dense,
    launch,
)
from pagedattn.cpu_backend.linear import CHUNK, weight_type
from pagedattn.cpu_backend.ops import FLOATS
from pagedattn.packed import PackedExperts


def top_k_softmax(logits: torch.Tensor, k: int, normalise: bool) -> Routing:
    """See `pagedattn.top_k_softmax`."""
    if logits.dtype not in FLOATS:
        return torch_backend.top_k_softmax(logits, k, normalise)
    logits = dense(logits)
    tokens, experts = logits.shape
    weights = logits.new_empty((tokens, k), dtype=torch.float32)
    chosen = logits.new_empty((tokens, k), dtype=torch.int32)
    launch(
        TOP_K,
        logits.data_ptr(),
        weights.data_ptr(),
        chosen.data_ptr(),
        tokens,
        experts,
        logits.stride(0),
        k,
        normalise,
        TYPES[logits.dtype],
        torch.get_num_threads(),
    )
    return Routing(weights, chosen)


def group_by_expert(experts: torch.Tensor, num_experts: int, loads: torch.Tensor | None) -> Groups:
    """See `pagedattn.group_by_expert`."""
    experts = experts.contiguous()
    tokens, k = experts.shape
    starts = experts.new_empty(num_experts + 1)
    index, places = experts.new_empty(tokens * k), torch.empty_like(experts)
    launch(
        GROUP,
        experts.data_ptr(),
        starts.data_ptr(),
        index.data_ptr(),
        places.data_ptr(),
        address(loads),
        tokens,
        k,
        num_experts,
    )
    return Groups(starts, index, places)


def grouped_linear(
    x: torch.Tensor,
    weight: PackedExperts,
    starts: torch.Tensor,
    index: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """See `pagedattn.grouped_linear`. Dtypes that the kernels do not know, and plain weights, go to torch."""
    if x.dtype not in FLOATS or not weight.panel:
        return torch_backend.grouped_linear(x, weight, starts, index, out)
    x, starts = dense(x), starts.contiguous()
    rows = x.shape[0] if index is None else index.shape[0]
    if index is not None:
        index = index.contiguous()
    result = x.new_empty((rows, weight.outputs)) if out is None else out
    if result.stride(1) != 1:
        result = x.new_empty((rows, weight.outputs))
    if not rows:
        return result if out is None else out
    packed = torch.empty(rows * (weight.inputs + CHUNK), dtype=torch.float32)
    launch(
        GROUPED_LINEAR,
        x.data_ptr(),
        weight.data.data_ptr(),
        address(weight.scales),
        address(weight.column_sums),
        starts.data_ptr(),
        address(index),
        result.data_ptr(),
        packed.data_ptr(),
        x.stride(0),
        result.stride(0),
        _bytes_apart(weight.data),
        _bytes_apart(weight.scales),
        _bytes_apart(weight.column_sums),
        rows,
        weight.inputs,
        weight.outputs,
        weight.count,
        weight.group,
        TYPES[x.dtype],
        weight_type(weight),
        torch.get_num_threads(),
    )
    if out is None or result.data_ptr() == out.data_ptr():
        return result
    return out.copy_(result)


def _bytes_apart(stacked: torch.Tensor | None) -> int:
    """Return the bytes from one expert's part to the next's."""
    return 0 if stacked is None else stacked.stride(0) * stacked.itemsize


def weighted_sum(
    results: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    """See `pagedattn.weighted_sum`."""
    if results.dtype not in FLOATS:
        return torch_backend.weighted_sum(results, places, weights, out)
    results, places, weights = dense(results), places.contiguous(), weights.contiguous()
    tokens, k = places.shape
    width = results.shape[1]
    total = results.new_empty((tokens, width)) if out is None else out
    if total.stride(1) != 1:
        total = results.new_empty((tokens, width))
    launch(
        WEIGHTED_SUM,
        results.data_ptr(),
        places.data_ptr(),
        weights.data_ptr(),
        total.data_ptr(),
        tokens,
        k,
        width,
        results.stride(0),
        total.stride(0),
        TYPES[results.dtype],
        torch.get_num_threads(),
    )
    if out is None or total.data_ptr() == out.data_ptr():
        return total
    return out.copy_(total)
