# ruff: noqa: ANN001, ANN201 (Triton infers the types of kernel arguments)
"""Triton kernels: storing keys and values, and attention of a mixed batch in one launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pagedattn.triton_backend.fp8 import round_to_fp8
from pagedattn.triton_backend.softmax import (
    attend_stretch,
    empty_softmax,
    finish_softmax,
    load_query,
    sink_softmax,
    store_partial,
    store_result,
)


class Pieces(NamedTuple):
    """Split of the contexts of short sequences; see `attend_kernel`."""

    splits: Any
    parts: Any
    shared: Any
    min_size: Any


@triton.jit
def write_kv_kernel(key, value, slots, cache, TILE_HEADS: tl.constexpr, TILE_DIM: tl.constexpr):
    """Grid (tokens): one token's keys and values, unless its slot is negative.

    `key`, `value` are Rows of `[tokens, KV_HEADS, HEAD_DIM]`, `slots` int64 `[tokens]`.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    row = slot // cache.BLOCK_SIZE * (2 * cache.KV_HEADS * cache.BLOCK_SIZE) + slot % cache.BLOCK_SIZE
    store_heads(key, token, row, cache, 0, TILE_HEADS, TILE_DIM)
    row += cache.KV_HEADS * cache.BLOCK_SIZE
    store_heads(value, token, row, cache, cache.KV_HEADS, TILE_HEADS, TILE_DIM)


@triton.jit
def store_heads(source, token, row, cache, scale_row, TILE_HEADS: tl.constexpr, TILE_DIM: tl.constexpr):
    """One token's heads, from `source` to the cache's rows from `row` on, BLOCK_SIZE apart."""
    heads = tl.arange(0, TILE_HEADS)[:, None]
    dims = tl.arange(0, TILE_DIM)[None, :]
    inside = (heads < cache.KV_HEADS) & (dims < cache.HEAD_DIM)
    offsets = token * source.token_stride + heads * source.head_stride
    stored = tl.load(source.data + offsets + dims, mask=inside, other=0.0)
    if cache.FP8 is not None:
        stored = stored.to(tl.float32)
        if cache.scales is not None:
            scale = tl.load(cache.scales + scale_row + heads, mask=heads < cache.KV_HEADS, other=1.0)
            stored = tl.math.div_rn(stored, tl.broadcast_to(scale, stored.shape))
        stored = round_to_fp8(stored)
    target = (row + heads * cache.BLOCK_SIZE) * cache.HEAD_DIM
    tl.store(cache.data + target + dims, stored, mask=inside)


@triton.jit(
    do_not_specialize=["table_stride", "num_seqs", "num_short", "splits", "parts", "shared", "min_piece"]
)
def attend_kernel(
    out,
    partials,
    query,
    cache,
    batch,
    scoring,
    table_stride,
    num_seqs,
    num_short,
    splits,
    parts,
    shared,
    min_piece,
    short,
    long,
):
    """Grid (short sequences × splits × head tiles + long query tiles × head tiles, KV_HEADS).

    The leading `num_short` sequences have at most `short.QUERIES` tokens: a program takes all of one
    sequence's against one of `splits` pieces, of at least `min_piece` positions, of its context from position
    `shared` on. It writes one of the last `splits` of `parts` partials, or `out` when `partials` is None.
    The other sequences go by tiles of `long.QUERIES` tokens, straight to `out`. `short` or `long` is None
    where there are none. In a mixed batch programs of both kinds lie side by side on the processors, those
    that wait for memory and those that wait for products. Query tiles go from the last, since the last tiles
    of a prompt see the most keys.
    """
    index = tl.program_id(0)
    pieces = Pieces(splits, parts, shared, min_piece)
    short_programs = 0
    if short is not None:
        short_programs = num_short * splits * tl.cdiv(cache.GROUP, short.HEADS)
    if long is None:
        attend_piece(out, partials, query, cache, batch, scoring, table_stride, pieces, index, short)
    elif short is None:
        index = tl.num_programs(0) - 1 - index
        attend_tile(out, query, cache, batch, scoring, table_stride, num_short, num_seqs, index, long)
    elif index < short_programs:
        attend_piece(out, partials, query, cache, batch, scoring, table_stride, pieces, index, short)
    else:
        index = tl.num_programs(0) - 1 - index
        attend_tile(out, query, cache, batch, scoring, table_stride, num_short, num_seqs, index, long)


@triton.jit
def attend_piece(out, partials, query, cache, batch, scoring, table_stride, pieces, index, tile):
    """One piece of the context of a sequence with few queries; see `attend_kernel`."""
    kv_head = tl.program_id(1)
    head_tiles = tl.cdiv(cache.GROUP, tile.HEADS)
    split = index // head_tiles % pieces.splits
    seq = index // head_tiles // pieces.splits
    start = tl.load(batch.query_starts + seq)
    count = tl.load(batch.query_starts + seq + 1) - start
    length = tl.load(batch.lengths + seq)
    first = length - count
    rows = tl.arange(0, tile.ROWS) // tile.HEADS
    used = (rows < tile.QUERIES) & (rows < count)
    tile_query = load_query(query, start + rows, first + rows, index % head_tiles, kv_head, used, cache, tile)

    begin = pieces.shared
    if scoring.window is not None:
        begin = tl.maximum(begin, first + 1 - scoring.window)
    # Pieces are whole steps, so that only the last has a ragged end.
    size = tl.maximum(tl.cdiv(length - begin, pieces.splits), pieces.min_size)
    size = tl.cdiv(size, tile.KEYS) * tile.KEYS
    begin += split * size
    end = tl.minimum(length, begin + size)
    if partials is None:
        softmax = sink_softmax(scoring.sinks, tile_query, tile)
    else:
        softmax = empty_softmax(tile)
    blocks = batch.block_table + seq.to(tl.int64) * table_stride
    softmax = attend_stretch(
        softmax, tile_query, cache, blocks, kv_head, begin, end, first, length - 1, scoring, tile
    )
    result = finish_softmax(softmax, cache, kv_head)
    if partials is None:
        store_result(out, result, start + rows, tile_query, cache, tile)
    else:
        part = pieces.parts - pieces.splits + split
        store_partial(partials, softmax, result, start + rows, part, pieces.parts, tile_query, cache, tile)


@triton.jit
def attend_tile(out, query, cache, batch, scoring, table_stride, first_seq, num_seqs, index, tile):
    """Query tile number `index // head tiles` of the sequences from `first_seq` on; see `attend_kernel`."""
    kv_head = tl.program_id(1)
    head_tiles = tl.cdiv(cache.GROUP, tile.HEADS)
    seq, begin_token = sequence_of_tile(
        batch.query_starts, first_seq, num_seqs, index // head_tiles, tile.QUERIES
    )
    start = tl.load(batch.query_starts + seq)
    count = tl.load(batch.query_starts + seq + 1) - start
    length = tl.load(batch.lengths + seq)
    rows = begin_token + tl.arange(0, tile.ROWS) // tile.HEADS
    used = (rows < begin_token + tile.QUERIES) & (rows < count)
    positions = length - count + rows
    tile_query = load_query(query, start + rows, positions, index % head_tiles, kv_head, used, cache, tile)

    first = length - count + begin_token
    last = tl.minimum(length, first + tile.QUERIES) - 1
    begin = 0
    if scoring.window is not None:
        begin = tl.maximum(0, first + 1 - scoring.window)
    end = tl.where(begin_token < count, last + 1, 0)
    blocks = batch.block_table + seq.to(tl.int64) * table_stride
    softmax = attend_stretch(
        sink_softmax(scoring.sinks, tile_query, tile),
        tile_query,
        cache,
        blocks,
        kv_head,
        begin,
        end,
        first,
        last,
        scoring,
        tile,
    )
    store_result(out, finish_softmax(softmax, cache, kv_head), start + rows, tile_query, cache, tile)


@triton.jit
def sequence_of_tile(query_starts, first_seq, num_seqs, tile, QUERIES: tl.constexpr):
    """The sequence that query tile number `tile` belongs to, and which of its tokens the tile begins with.

    Counting from sequence `first_seq` and its first token, sequence s owns the tiles from start // QUERIES +
    s on: with one tile more than its tokens fill, a sequence always has enough, and the grid's size follows
    from the number of tokens. A tile may begin beyond its sequence's tokens.
    """
    origin = tl.load(query_starts + first_seq)
    low = first_seq
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(query_starts + middle) - origin
        if start // QUERIES + middle - first_seq <= tile:
            low = middle
        else:
            high = middle
    start = tl.load(query_starts + low) - origin
    return low, (tile - start // QUERIES - (low - first_seq)) * QUERIES
