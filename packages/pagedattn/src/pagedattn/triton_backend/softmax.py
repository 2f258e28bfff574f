# ruff: noqa: ANN001, ANN201 (Triton infers the types of kernel arguments)
"""Online softmax over a stretch of a paged context, the loop that all attention kernels share.

It is in base 2 (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867; Dao et al.,
https://arxiv.org/abs/2205.14135). The query heads that share a KV head are rows of one matrix product, so
that each key and value is read once a group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pagedattn.triton_backend.fp8 import widen_fp8

LOG2_E = tl.constexpr(1.4426950408889634)


class Softmax(NamedTuple):
    """`maximum` and `total` `[ROWS]`: the greatest score times log2(e) so far, and the sum of
    2^(score - maximum); `weighted [ROWS, DIM]`: the sum of the values by those weights."""

    maximum: Any
    total: Any
    weighted: Any


class Query(NamedTuple):
    """A tile's rows: `data [ROWS, DIM]`, their `positions` in the context and `heads` `[ROWS]`, and `used
    [ROWS]`, false for padding."""

    data: Any
    positions: Any
    heads: Any
    used: Any


@triton.jit
def load_query(query, tokens, positions, head_tile, kv_head, used, cache, tile):
    """A tile's rows of `tokens [ROWS]` (rows of the batch), in the type that they are multiplied in.

    Against float8 keys 16-bit queries are float16, to which codes widen in the fewest instructions: exact
    between 6e-5 and 65504, cut beyond.
    """
    head_in_group = head_tile * tile.HEADS + tl.arange(0, tile.ROWS) % tile.HEADS
    heads = kv_head * cache.GROUP + head_in_group
    used = used & (head_in_group < cache.GROUP)
    dims = tl.arange(0, tile.DIM)
    offsets = tokens.to(tl.int64) * query.token_stride + heads * query.head_stride
    mask = used[:, None] & (dims < cache.HEAD_DIM)[None, :]
    data = tl.load(query.data + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
    if cache.FP8 is not None and data.dtype == tl.bfloat16:
        data = tl.clamp(data.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    return Query(data, positions, heads, used)


@triton.jit
def empty_softmax(tile):
    return Softmax(
        tl.full([tile.ROWS], -float("inf"), tl.float32),
        tl.zeros([tile.ROWS], tl.float32),
        tl.zeros([tile.ROWS, tile.DIM], tl.float32),
    )


@triton.jit
def sink_softmax(sinks, query, tile):
    """A softmax that has seen the sinks, if there are any."""
    softmax = empty_softmax(tile)
    if sinks is not None:
        maximum = tl.load(sinks + query.heads, mask=query.used, other=0.0) * LOG2_E
        softmax = Softmax(maximum, softmax.total + 1.0, softmax.weighted)
    return softmax


@triton.jit
def load_keys(cache, rows, readable, dims, dtype: tl.constexpr, MASKED: tl.constexpr):
    """Keys or values `[KEYS, DIM]` of the cache's `rows [KEYS]`; only `readable` ones if MASKED."""
    pointers = cache.data + (rows * cache.HEAD_DIM)[:, None] + dims[None, :]
    if MASKED:
        loaded = tl.load(pointers, mask=readable[:, None] & (dims < cache.HEAD_DIM)[None, :], other=0)
    elif dims.shape[0] != cache.HEAD_DIM:
        loaded = tl.load(pointers, mask=(dims < cache.HEAD_DIM)[None, :], other=0)
    else:
        loaded = tl.load(pointers)
    if cache.FP8 is not None:
        loaded = widen_fp8(loaded, cache.FP8 == "hardware").to(dtype)
    return loaded


@triton.jit
def score_keys(products, distance, slopes, scale, scoring):
    """Scores times log2(e) from query · key; `scale` holds the keys' own scale too."""
    if scoring.soft_cap is None:
        scores = products * (scale * LOG2_E)
    else:
        # tanh(x) = 1 - 2 / (e^2x + 1)
        powers = tl.exp2(products * (scale * (2.0 * LOG2_E) / scoring.soft_cap))
        scores = (scoring.soft_cap * LOG2_E) * (1.0 - 2.0 / (powers + 1.0))
    if slopes is not None:
        scores += (slopes * LOG2_E)[:, None] * distance
    return scores


@triton.constexpr_function
def product_precision(dim: int) -> str:
    """Precision of float32 products: one TF32 product would lose half the digits and three next to none, but
    beyond 128 dimensions three need more registers than there are."""
    return "tf32x3" if dim <= 128 else "ieee"


@triton.jit
def accumulate(
    softmax, query, slopes, scale, cache, blocks, kv_head, begin, end, scoring, tile, MASKED: tl.constexpr
):
    """`softmax` carried on over key positions begin … end - 1.

    Without MASKED every row must see all of them and they must be whole steps of KEYS. No other key is read:
    block table entries and slots may be stale.
    """
    dims = tl.arange(0, tile.DIM)
    maximum, total, weighted = softmax.maximum, softmax.total, softmax.weighted
    for first in range(begin, end, tile.KEYS):
        keys = first + tl.arange(0, tile.KEYS)
        readable = keys < end
        if MASKED:
            block = tl.load(blocks + keys // cache.BLOCK_SIZE, mask=readable, other=0).to(tl.int64)
        else:
            block = tl.load(blocks + keys // cache.BLOCK_SIZE).to(tl.int64)
        rows = (block * (2 * cache.KV_HEADS) + kv_head) * cache.BLOCK_SIZE + keys % cache.BLOCK_SIZE
        key = load_keys(cache, rows, readable, dims, query.data.dtype, MASKED)
        products = tl.dot(query.data, tl.trans(key), input_precision=product_precision(tile.DIM))
        distance = keys[None, :] - query.positions[:, None]
        scores = score_keys(products, distance, slopes, scale, scoring)
        if MASKED:
            visible = readable[None, :] & (distance <= 0)
            if scoring.window is not None:
                visible &= distance > -scoring.window
            scores = tl.where(visible, scores, -float("inf"))

        highest = tl.maximum(maximum, tl.max(scores, axis=1))
        shift = highest
        if MASKED:
            # A row that has seen nothing yet stays at -inf, and -inf - -inf is NaN.
            shift = tl.where(highest == -float("inf"), 0.0, highest)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(maximum - shift)
        total = total * decay + tl.sum(weights, axis=1)
        rows += cache.KV_HEADS * cache.BLOCK_SIZE
        value = load_keys(cache, rows, readable, dims, query.data.dtype, MASKED)
        weighted = weighted * decay[:, None]
        weighted = tl.dot(
            weights.to(value.dtype), value, weighted, input_precision=product_precision(tile.DIM)
        )
        maximum = highest
    return Softmax(maximum, total, weighted)


@triton.jit
def attend_stretch(softmax, query, cache, blocks, kv_head, begin, end, first, last, scoring, tile):
    """`softmax` carried on over what positions `first` … `last`, the tile's queries, see of begin … end - 1.

    Only the edges are masked: where a sliding window opens, and where the causal diagonal runs or the context
    ends.
    """
    scale = scoring.scale
    if cache.scales is not None:
        scale *= tl.load(cache.scales + kv_head)
    slopes = None
    if scoring.slopes is not None:
        slopes = tl.load(scoring.slopes + query.heads, mask=query.used, other=0.0)
    if scoring.window is not None:
        opening = tl.maximum(last - scoring.window + 1 - begin, 0)
        opened = tl.minimum(end, begin + tl.cdiv(opening, tile.KEYS) * tile.KEYS)
        softmax = accumulate(
            softmax, query, slopes, scale, cache, blocks, kv_head, begin, opened, scoring, tile, True
        )
        begin = opened
    whole = tl.maximum(tl.minimum(end, first + 1) - begin, 0) // tile.KEYS * tile.KEYS
    softmax = accumulate(
        softmax, query, slopes, scale, cache, blocks, kv_head, begin, begin + whole, scoring, tile, False
    )
    return accumulate(
        softmax, query, slopes, scale, cache, blocks, kv_head, begin + whole, end, scoring, tile, True
    )


@triton.jit
def finish_softmax(softmax, cache, kv_head):
    """The weighted mean `[ROWS, DIM]`; 0 where nothing was seen."""
    result = softmax.weighted / tl.where(softmax.total == 0.0, 1.0, softmax.total)[:, None]
    if cache.scales is not None:
        result *= tl.load(cache.scales + cache.KV_HEADS + kv_head)
    return result


@triton.jit
def store_result(out, result, tokens, query, cache, tile):
    dims = tl.arange(0, tile.DIM)
    offsets = tokens.to(tl.int64) * out.token_stride + query.heads * out.head_stride
    mask = query.used[:, None] & (dims < cache.HEAD_DIM)[None, :]
    tl.store(out.data + offsets[:, None] + dims[None, :], result.to(out.data.dtype.element_ty), mask=mask)


@triton.jit
def store_partial(partials, softmax, result, tokens, part, parts, query, cache, tile):
    """Part number `part` of `parts`; nothing but its log where it saw nothing."""
    dims = tl.arange(0, tile.DIM)
    rows = (tokens.to(tl.int64) * (cache.KV_HEADS * cache.GROUP) + query.heads) * parts + part
    tl.store(partials.logs + rows, softmax.maximum + tl.log2(softmax.total), mask=query.used)
    mask = (query.used & (softmax.total > 0.0))[:, None] & (dims < cache.HEAD_DIM)[None, :]
    tl.store(partials.means + (rows * cache.HEAD_DIM)[:, None] + dims[None, :], result, mask=mask)
