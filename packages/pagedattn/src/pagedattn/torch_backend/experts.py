"""Mixtures of experts in plain torch; the Triton back end has another grouped product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch.nn import functional as F

from pagedattn.backends import Groups, Routing
from pagedattn.packed import PackedExperts
from pagedattn.torch_backend.grouped import grouped_matmul
from pagedattn.torch_backend.linear import linear

GroupedMatmul = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def top_k_softmax(logits: torch.Tensor, k: int, normalise: bool) -> Routing:
    """See `pagedattn.top_k_softmax`."""
    weights = logits.float().softmax(-1)
    experts = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).topk(k, dim=-1).indices
    weights = weights.gather(-1, experts)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(weights, experts.to(torch.int32))


def group_by_expert(experts: torch.Tensor, num_experts: int, loads: torch.Tensor | None) -> Groups:
    """See `pagedattn.group_by_expert`."""
    chosen = experts.flatten().long()
    order = chosen.argsort(stable=True)
    counts = chosen.new_zeros(num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))
    if loads is not None:
        loads += counts
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    starts = F.pad(counts.cumsum(0), (1, 0))
    index = order // max(experts.shape[1], 1)
    found = (starts, index, places.view(experts.shape))
    return Groups(*(part.to(torch.int32) for part in found))


def multiply_groups(
    matmul: GroupedMatmul,
    x: torch.Tensor,
    weight: PackedExperts,
    starts: torch.Tensor,
    index: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Do as `grouped_linear` by a product of sorted rows with plain weights.

    Mixed dtypes are multiplied in the widest, which is at least float32.
    """
    rows = x if index is None else x.index_select(0, index)
    if weight.quantization is not None:
        result = x.new_empty((len(rows), weight.outputs)) if out is None else out
        bounds = starts.tolist()
        for expert, (begin, end) in enumerate(pairwise(bounds)):
            if begin < end:
                linear(rows[begin:end], weight.expert(expert), None, result[begin:end])
        return result
    plain = weight.unpack()
    if plain.dtype == x.dtype:
        result = matmul(rows, plain, starts)
    else:
        wide = torch.promote_types(torch.promote_types(x.dtype, plain.dtype), torch.float32)
        result = matmul(rows.to(wide), plain.to(wide), starts).to(x.dtype)
    return result if out is None else out.copy_(result)


grouped_linear = partial(multiply_groups, grouped_matmul)
"""See `pagedattn.grouped_linear`."""


def weighted_sum(
    results: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    """See `pagedattn.weighted_sum`."""
    total = torch.zeros((len(places), results.shape[1]), dtype=torch.float32, device=results.device)
    for choice in range(places.shape[1]):
        total += results.index_select(0, places[:, choice]).float() * weights[:, choice, None]
    total = total.to(results.dtype)
    return total if out is None else out.copy_(total)
