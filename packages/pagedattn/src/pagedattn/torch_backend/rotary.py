"""Rotary position embedding in plain torch."""

from __future__ import annotations

import torch


def rotary(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `pagedattn.rotary`."""
    rows = cos_sin if positions is None else cos_sin.index_select(0, positions)
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
