"""Rotary position embedding."""

from __future__ import annotations

import torch

from pagedattn.backends import backend_of


def rotary(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor,
    interleaved: bool = False,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys turned by their positions, as new tensors.

    `query` is `[tokens, q_heads, head_dim]`, `key` `[tokens, kv_heads, head_dim]`. A row of `cos_sin`
    holds the cosines, then the sines, of one position: `[max_position, rotary_dim]`, float32 for full
    precision; the arithmetic is done in its dtype or the query's, whichever is wider, or in float32. Only
    the first `rotary_dim` elements of a head are turned. `positions` is integer `[tokens]`, each below
    max_position; None says that `cos_sin` was already indexed by position, `[tokens, rotary_dim]`, which
    saves doing it in every layer.

    Element i of a head's rotary part is paired with i + rotary_dim / 2 (GPT-NeoX, Llama), or its
    neighbour if `interleaved` (GPT-J). (Su et al., https://arxiv.org/abs/2104.09864.)

    Raises ValueError when shapes do not fit together.
    """
    tokens, head_dim = query.shape[0], query.shape[2]
    rows, rotary_dim = cos_sin.shape
    if positions is not None:
        rows = positions.shape[0]
    if key.shape[0] != tokens or rows != tokens:
        raise ValueError(f"{tokens} queries, {key.shape[0]} keys and {rows} positions")
    if rotary_dim % 2 or rotary_dim > head_dim or head_dim != key.shape[2]:
        raise ValueError(
            f"rotary_dim {rotary_dim} must be even and within the head_dim of query and key, "
            f"{head_dim} and {key.shape[2]}"
        )
    return backend_of(query.device, backend).rotary(query, key, positions, cos_sin, interleaved)
