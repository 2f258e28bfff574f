"""The one place where the torch back end turns scores into weights."""

from __future__ import annotations

import torch

from pagedattn.backends import ScoreOptions


def softmax_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    options: ScoreOptions,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of `query [b, m, d]` over `key`, `value [b, n, d]`: `[b, m, d]`, all float32.

    `bias` (broadcastable to `[b, m, n]`) holds -inf where a key is hidden; no row may be hidden
    altogether. `sinks` is `[b, m, 1]`. Half-precision caches are widened first: scores rounded to
    bfloat16 would cost five times the error of rounding the result.
    """
    if options.soft_cap is None:
        scores = torch.baddbmm(bias, query, key.transpose(1, 2), alpha=options.scale)
    else:
        scores = torch.bmm(query, key.transpose(1, 2)).mul_(options.scale / options.soft_cap)
        scores = scores.tanh_().mul_(options.soft_cap).add_(bias)
    if sinks is None:
        return torch.bmm(torch.softmax(scores, dim=-1), value, out=out)
    weights = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
    return torch.bmm(weights, value, out=out)
