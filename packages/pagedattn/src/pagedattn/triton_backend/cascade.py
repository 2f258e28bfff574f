# ruff: noqa: ANN001, ANN201 (Triton infers the types of kernel arguments)
"""Attention over a prefix that many sequences share, read once for all of them.

What it yields is merged with attention over the rest of each context (Juravsky et al., "Hydragen",
https://arxiv.org/abs/2402.05099; Ye et al., "Cascade Inference",
https://flashinfer.ai/2024/02/02/cascade-inference.html).
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedattn.triton_backend.softmax import (
    Softmax,
    attend_stretch,
    empty_softmax,
    finish_softmax,
    load_query,
    store_partial,
)

# The launch of one more kernel and its ramp take about as long as reading this much, on the device that reads
# 3 to 5 TB/s.
LAUNCH_BYTES = 16 << 20


def prefix_pays(
    *, num_seqs: int, query_tiles: int, shared: int, position_bytes: int, partial_bytes: int
) -> bool:
    """Whether reading a shared prefix once for all is less work than reading it once a sequence.

    Of `num_seqs` reads of `shared` positions, keys and values of `position_bytes` each, `query_tiles` remain,
    one for each tile that the queries fill. Each query's partial results, `partial_bytes` in all, are written
    and read on the way, and there is one more kernel to launch. Repeated reads that hit the device's second
    level cache cost less than counted here: for a prefix that fits it, the gain is smaller, but not below 0.
    """
    saved = (num_seqs - query_tiles) * shared * position_bytes
    return saved > 2 * partial_bytes + LAUNCH_BYTES


@triton.jit(
    do_not_specialize=["table_stride", "num_seqs", "num_tokens", "splits", "parts", "shared", "min_piece"]
)
def attend_prefix_kernel(
    partials,
    query,
    cache,
    batch,
    scoring,
    table_stride,
    num_seqs,
    num_tokens,
    splits,
    parts,
    shared,
    min_piece,
    tile,
):
    """Grid (query tiles × head tiles × splits, KV_HEADS): tile.QUERIES tokens, of whatever sequences, over
    one of `splits` pieces of their first `shared` positions.

    Writes one of the first `splits` of `parts` partials for each of the batch's first `num_tokens` tokens.
    Every query lies behind the prefix and sees all of it, but those of sequences of length 0.
    """
    kv_head = tl.program_id(1)
    head_tiles = tl.cdiv(cache.GROUP, tile.HEADS)
    split = tl.program_id(0) % splits
    index = tl.program_id(0) // splits
    rows = tl.arange(0, tile.ROWS) // tile.HEADS
    tokens = index // head_tiles * tile.QUERIES + rows
    used = (rows < tile.QUERIES) & (tokens < num_tokens)
    seqs = sequences_of_tokens(batch.query_starts, num_seqs, tl.where(used, tokens, 0))
    next_starts = tl.load(batch.query_starts + seqs + 1)
    positions = tl.load(batch.lengths + seqs) - next_starts + tokens
    behind = used & (positions >= shared)
    tile_query = load_query(query, tokens, positions, index % head_tiles, kv_head, used, cache, tile)

    # Any sequence's table leads to the prefix, but that of one of length 0.
    seq = tl.max(tl.where(behind, seqs, -1), axis=0)
    size = tl.maximum(tl.cdiv(shared, splits), min_piece)
    size = tl.cdiv(size, tile.KEYS) * tile.KEYS
    begin = split * size
    end = tl.where(seq < 0, 0, tl.minimum(shared, begin + size))
    blocks = batch.block_table + tl.maximum(seq, 0).to(tl.int64) * table_stride
    softmax = attend_stretch(
        empty_softmax(tile), tile_query, cache, blocks, kv_head, begin, end, shared, shared, scoring, tile
    )
    softmax = Softmax(softmax.maximum, tl.where(behind, softmax.total, 0.0), softmax.weighted)
    result = finish_softmax(softmax, cache, kv_head)
    store_partial(partials, softmax, result, tokens, split, parts, tile_query, cache, tile)


@triton.jit
def sequences_of_tokens(query_starts, num_seqs, tokens):
    """The sequence that each of `tokens [ROWS]` belongs to, by bisection."""
    low = tl.zeros_like(tokens)
    high = low + num_seqs
    width = num_seqs
    while width > 1:
        middle = (low + high) // 2
        below = tl.load(query_starts + middle) <= tokens
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
        width = (width + 1) // 2
    return low
