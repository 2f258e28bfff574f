"""Rotary position embedding."""

from __future__ import annotations

import torch


def rotary(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys turned by their positions, as new tensors.

    `query` is `[tokens, q_heads, head_dim]`, `key` `[tokens, kv_heads, head_dim]`. A row of `cos_sin`
    holds the cosines, then the sines, of one position: `[max_position, rotary_dim]`, float32 for full
    precision; the arithmetic is done in its dtype or the query's, whichever is wider. Only the first
    `rotary_dim` elements of a head are turned. `positions` is integer `[tokens]`; None says that
    `cos_sin` was already indexed by position, `[tokens, rotary_dim]`, which saves doing it in every layer.

    Element i of a head's rotary part is paired with i + rotary_dim / 2 (GPT-NeoX, Llama), or its
    neighbour if `interleaved` (GPT-J). (Su et al., https://arxiv.org/abs/2104.09864.)
    """
    rows = cos_sin if positions is None else cos_sin.index_select(0, positions)
    tokens, rotary_dim = query.shape[0], rows.shape[1]
    if key.shape[0] != tokens or rows.shape[0] != tokens:
        raise ValueError(f"{tokens} queries, {key.shape[0]} keys and {rows.shape[0]} positions")
    if rotary_dim % 2 or rotary_dim > query.shape[2] or query.shape[2] != key.shape[2]:
        raise ValueError(
            f"rotary_dim {rotary_dim} must be even and within the head_dim of query and key, "
            f"{query.shape[2]} and {key.shape[2]}"
        )
    cos, sin = rows.unsqueeze(1).chunk(2, dim=-1)
    return _turn(query, cos, sin, interleaved), _turn(key, cos, sin, interleaved)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """`x [tokens, heads, head_dim]` by the angles of `cos`, `sin [tokens, 1, rotary_dim / 2]`."""
    half = cos.shape[-1]
    pair_dim = -1 if interleaved else -2
    pairs = x[..., : 2 * half].unflatten(-1, (half, 2) if interleaved else (2, half))
    turned = pairs * cos.unsqueeze(pair_dim)
    first, second = pairs.unbind(pair_dim)
    turned.select(pair_dim, 0).addcmul_(second, sin, value=-1)
    turned.select(pair_dim, 1).addcmul_(first, sin)
    turned = turned.flatten(-2).to(x.dtype)
    if 2 * half == x.shape[-1]:
        return turned
    return torch.cat((turned, x[..., 2 * half :]), dim=-1)
