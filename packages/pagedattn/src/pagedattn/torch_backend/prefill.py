"""Sequences with several queries, one at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from pagedattn.backends import ScoreOptions
from pagedattn.layout import FP8
from pagedattn.torch_backend.softmax import softmax_attention

# Queries a pass where a mask [queries, keys] is needed: a pass skips the keys after its last query.
MASKED_QUERIES = 256
# Bounds the scores [q_heads, queries, keys] of a pass where they are materialised.
MAX_SCORES = 1 << 24


class Span(NamedTuple):
    """A sequence's queries, and the part of its context that at least one of them sees."""

    start: int  # first query token in the batch
    stop: int
    first: int  # first visible position
    length: int  # one past the last
    tiles: torch.Tensor  # int64 [2 * kv_heads * blocks]: the cache's [block_size, head_dim] tiles to gather


def attend_span(
    query: torch.Tensor, cache: torch.Tensor, span: Span, options: ScoreOptions, out: torch.Tensor
) -> None:
    """Attention of one sequence's queries; arguments as in `pagedattn.attend`."""
    kv_heads, block_size, head_dim = cache.shape[2:]
    gathered = _gather(cache, span, options)
    skipped = span.first % block_size
    # Cut to the visible positions: slots outside may hold NaN.
    visible = slice(skipped, skipped + span.length - span.first)
    keys, values = gathered.view(2, kv_heads, -1, head_dim)[:, :, visible]

    def by_kv_head(tensor: torch.Tensor) -> torch.Tensor:  # [kv_heads, group, queries, head_dim]
        return tensor[span.start : span.stop].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)

    queries, results = by_kv_head(query.to(keys.dtype)), by_kv_head(out)
    num_queries = queries.shape[2]
    plain = options.soft_cap is None and options.alibi_slopes is None and options.sinks is None
    if plain and num_queries == span.length and (options.window is None or options.window >= span.length):
        results.copy_(_fused(queries, keys, values, None, options.scale))
        return
    step = MASKED_QUERIES if plain else max(1, MAX_SCORES // (query.shape[1] * keys.shape[1]))
    for begin in range(0, num_queries, step):
        end = min(begin + step, num_queries)
        first_query = span.length - num_queries + begin
        low = span.first if options.window is None else max(span.first, first_query + 1 - options.window)
        seen = slice(low - span.first, first_query + end - begin - span.first)
        distance = _distance(first_query, end - begin, low, seen.stop - seen.start, query.device)
        attention = _fused_masked if plain else _explicit
        results[:, :, begin:end] = attention(
            queries[:, :, begin:end], keys[:, seen], values[:, seen], distance, options
        )


def _gather(cache: torch.Tensor, span: Span, options: ScoreOptions) -> torch.Tensor:
    """The span's keys, then values, head by head; those of a float8 cache as float32."""
    kv_heads, block_size, head_dim = cache.shape[2:]
    if cache.dtype != FP8:
        return cache.view(-1, block_size * head_dim).index_select(0, span.tiles)
    # Torch gathers bytes, not float8.
    stored = cache.view(torch.uint8).view(-1, block_size * head_dim).index_select(0, span.tiles)
    widened = stored.view(FP8).float()
    if options.kv_scales is not None:
        by_head = widened.view(2, kv_heads, -1)
        by_head *= options.kv_scales.view(2, kv_heads, 1)
    return widened


def _distance(
    first_query: int, queries: int, first_key: int, keys: int, device: torch.device
) -> torch.Tensor:
    """Key position - query position, int64 `[queries, keys]`."""
    key_positions = torch.arange(first_key, first_key + keys, device=device)
    query_positions = torch.arange(first_query, first_query + queries, device=device)
    return key_positions - query_positions.unsqueeze(1)


def _visible(distance: torch.Tensor, window: int | None) -> torch.Tensor:
    causal = distance <= 0
    return causal if window is None else causal & (distance > -window)


def _fused(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Torch's fused attention of `[kv_heads, group, queries, head_dim]`; causal when there is no mask.

    KV heads stand in for the batch and each is expanded over its group without a copy, which
    `enable_gqa` would make.
    """
    group = queries.shape[1]
    return F.scaled_dot_product_attention(
        queries,
        keys.unsqueeze(1).expand(-1, group, -1, -1),
        values.unsqueeze(1).expand(-1, group, -1, -1),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )


def _fused_masked(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    distance: torch.Tensor,
    options: ScoreOptions,
) -> torch.Tensor:
    return _fused(queries, keys, values, _visible(distance, options.window), options.scale)


def _explicit(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    distance: torch.Tensor,
    options: ScoreOptions,
) -> torch.Tensor:
    """The same with materialised scores, for what the fused kernel has no option for."""
    kv_heads, group, count, head_dim = queries.shape
    bias = torch.zeros(distance.shape, dtype=torch.float32, device=queries.device)
    bias.masked_fill_(~_visible(distance, options.window), -torch.inf)
    bias = bias.expand(1, group, -1, -1)
    if options.alibi_slopes is not None:
        bias = bias + options.alibi_slopes.float().view(kv_heads, group, 1, 1) * distance
    sinks = None
    if options.sinks is not None:
        sinks = options.sinks.float().view(kv_heads, group, 1, 1).expand(-1, -1, count, -1).flatten(1, 2)
    rows = queries.flatten(1, 2).float()
    result = softmax_attention(rows, keys.float(), values.float(), bias.flatten(1, 2), options, sinks)
    return result.view(kv_heads, group, count, head_dim)
