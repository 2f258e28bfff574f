# ruff: noqa: ANN001, ANN201 (Triton infers the types of kernel arguments)
"""Triton kernels: storing keys and values, and attention of a mixed batch in one launch.

Softmax is online and in base 2 (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867; Dao et al.,
https://arxiv.org/abs/2205.14135). The query heads that share a KV head are rows of one matrix product,
so that each key and value is read once a group.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def write_kv_kernel(
    cache,
    key,
    value,
    slots,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """One program stores one token's keys and values, unless its slot is negative."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    heads = tl.arange(0, TILE_HEADS)[:, None]
    dims = tl.arange(0, TILE_DIM)[None, :]
    inside = (heads < KV_HEADS) & (dims < HEAD_DIM)
    keys = tl.load(key + token * key_stride + heads * key_head_stride + dims, mask=inside)
    values = tl.load(value + token * value_stride + heads * value_head_stride + dims, mask=inside)
    row = (slot // BLOCK_SIZE * 2 * KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
    tl.store(cache + row * HEAD_DIM + dims, keys, mask=inside)
    tl.store(cache + (row + KV_HEADS * BLOCK_SIZE) * HEAD_DIM + dims, values, mask=inside)


@triton.jit
def accumulate(
    queries,
    positions,
    slopes,
    cache,
    blocks,
    kv_head,
    begin,
    end,
    scale,
    soft_cap,
    window,
    maximum,
    total,
    weighted,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over key positions begin … end - 1, carried on from `maximum, total, weighted`.

    `maximum` and `total` `[rows]` are the greatest score times log2(e) so far and the sum of
    2^(score - maximum); `weighted [rows, TILE_DIM]` is the sum of the values by those weights.
    Keys outside begin … end - 1 are not read: their block table entries may be stale.
    """
    dims = tl.arange(0, TILE_DIM)
    for first in range(begin, end, TILE_KEYS):
        keys = first + tl.arange(0, TILE_KEYS)
        inside = keys < end
        block = tl.load(blocks + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        row = ((block * 2 * KV_HEADS + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE) * HEAD_DIM
        key_mask = inside[None, :] & (dims < HEAD_DIM)[:, None]
        key = tl.load(cache + row[None, :] + dims[:, None], mask=key_mask, other=0.0)
        scores = tl.dot(queries, key, input_precision=PRECISION) * scale
        if soft_cap is not None:
            # tanh(x) = 2 sigmoid(2x) - 1
            scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)
        distance = keys[None, :] - positions[:, None]
        if slopes is not None:
            scores += slopes[:, None] * distance
        visible = inside[None, :] & (distance <= 0)
        if window is not None:
            visible &= distance > -window
        scores = tl.where(visible, scores * LOG2_E, -float("inf"))

        highest = tl.maximum(maximum, tl.max(scores, axis=1))
        # A row that has seen nothing yet stays at -inf, and -inf - -inf is NaN.
        shift = tl.where(highest == -float("inf"), 0.0, highest)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(maximum - shift)
        total = total * decay + tl.sum(weights, axis=1)
        value_row = row + KV_HEADS * BLOCK_SIZE * HEAD_DIM
        value_mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
        value = tl.load(cache + value_row[:, None] + dims[None, :], mask=value_mask, other=0.0)
        weighted = weighted * decay[:, None]
        weighted = tl.dot(weights.to(value.dtype), value, weighted, input_precision=PRECISION)
        maximum = highest
    return maximum, total, weighted


@triton.jit
def sequence_of_tile(query_starts, num_seqs, tile, TILE_QUERIES: tl.constexpr):
    """The sequence that query tile number `tile` belongs to.

    Sequence s owns the tiles from query_starts[s] // TILE_QUERIES + s on: with one tile more than its
    tokens fill, a sequence always has enough, and the grid's size follows from the number of tokens.
    """
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // TILE_QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["num_seqs", "window"])
def attend_kernel(
    out,
    query,
    cache,
    query_starts,
    lengths,
    block_table,
    alibi_slopes,
    sinks,
    num_seqs,
    scale,
    soft_cap,
    window,
    out_stride,
    out_head_stride,
    query_stride,
    query_head_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (query tiles, kv_heads, head tiles of a group).

    A program takes TILE_QUERIES tokens of one sequence and TILE_HEADS query heads of one KV head.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = sequence_of_tile(query_starts, num_seqs, tile, TILE_QUERIES)
    start = tl.load(query_starts + seq)
    count = tl.load(query_starts + seq + 1) - start
    first = (tile - start // TILE_QUERIES - seq) * TILE_QUERIES
    if first >= count:
        return
    length = tl.load(lengths + seq)

    rows = tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, TILE_DIM)
    tokens = first + rows // TILE_HEADS
    head_in_group = tl.program_id(2) * TILE_HEADS + rows % TILE_HEADS
    heads = kv_head * GROUP + head_in_group
    used = (rows < TILE_QUERIES * TILE_HEADS) & (tokens < count) & (head_in_group < GROUP)
    mask = used[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = (start + tokens).to(tl.int64) * query_stride + heads * query_head_stride
    queries = tl.load(query + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads, mask=used, other=0.0)

    if sinks is not None:
        maximum = tl.load(sinks + heads, mask=used, other=0.0) * LOG2_E
        total = tl.full([TILE_ROWS], 1.0, tl.float32)
    else:
        maximum = tl.full([TILE_ROWS], -float("inf"), tl.float32)
        total = tl.zeros([TILE_ROWS], tl.float32)
    weighted = tl.zeros([TILE_ROWS, TILE_DIM], tl.float32)

    first_position = length - count + first
    begin = 0
    if window is not None:
        begin = tl.maximum(0, first_position + 1 - window)
    maximum, total, weighted = accumulate(
        queries,
        length - count + tokens,
        slopes,
        cache,
        block_table + seq.to(tl.int64) * table_stride,
        kv_head,
        begin,
        tl.minimum(length, first_position + TILE_QUERIES),
        scale,
        soft_cap,
        window,
        maximum,
        total,
        weighted,
        KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        TILE_KEYS,
        TILE_DIM,
        PRECISION,
    )
    # A sequence of length 0 has seen nothing: 0 / 1.
    result = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
    offsets = (start + tokens).to(tl.int64) * out_stride + heads * out_head_stride
    tl.store(out + offsets[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=mask)
