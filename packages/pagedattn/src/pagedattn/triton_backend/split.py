# ruff: noqa: ANN001, ANN201 (Triton infers the types of kernel arguments)
"""Split-KV decode: long contexts of few sequences, cut into pieces that fill the device.

Each piece yields its own softmax and a second kernel merges them (Dao et al., "Flash-Decoding",
https://pytorch.org/blog/flash-decoding/).
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedattn.triton_backend.kernels import LOG2_E, accumulate


@triton.jit(do_not_specialize=["window"])
def attend_piece_kernel(
    pieces,
    logs,
    query,
    cache,
    lengths,
    block_table,
    alibi_slopes,
    scale,
    soft_cap,
    window,
    query_stride,
    query_head_stride,
    table_stride,
    SPLITS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (sequences, kv_heads, head tiles × SPLITS): one token over one piece of its visible context.

    Writes float32 `pieces [tokens, q_heads, SPLITS, HEAD_DIM]`, each normalised by itself, and
    `logs [tokens, q_heads, SPLITS]`, the log2 of its softmax denominator: -inf where a piece is empty.
    """
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2) % SPLITS
    length = tl.load(lengths + seq)
    begin = 0
    if window is not None:
        begin = tl.maximum(0, length - window)
    span = tl.cdiv(tl.cdiv(length - begin, SPLITS), TILE_KEYS) * TILE_KEYS

    rows = tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, TILE_DIM)
    head_in_group = tl.program_id(2) // SPLITS * TILE_HEADS + rows
    heads = kv_head * GROUP + head_in_group
    used = (rows < TILE_HEADS) & (head_in_group < GROUP)
    mask = used[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = seq.to(tl.int64) * query_stride + heads * query_head_stride
    queries = tl.load(query + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads, mask=used, other=0.0)
    maximum, total, weighted = accumulate(
        queries,
        tl.full([TILE_ROWS], 0, tl.int32) + (length - 1),
        slopes,
        cache,
        block_table + seq.to(tl.int64) * table_stride,
        kv_head,
        begin + split * span,
        tl.minimum(length, begin + (split + 1) * span),
        scale,
        soft_cap,
        window,
        tl.full([TILE_ROWS], -float("inf"), tl.float32),
        tl.zeros([TILE_ROWS], tl.float32),
        tl.zeros([TILE_ROWS, TILE_DIM], tl.float32),
        KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        TILE_KEYS,
        TILE_DIM,
        PRECISION,
    )
    row = (seq.to(tl.int64) * KV_HEADS * GROUP + heads) * SPLITS + split
    result = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(pieces + row[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)
    tl.store(logs + row, maximum + tl.log2(total), mask=used)


@triton.jit
def merge_pieces_kernel(
    out,
    pieces,
    logs,
    sinks,
    out_stride,
    out_head_stride,
    SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """Grid (sequences, q_heads): weighs the pieces of one query head by their denominators."""
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    splits = tl.arange(0, TILE_SPLITS)
    dims = tl.arange(0, TILE_DIM)
    row = (seq * tl.num_programs(1) + head) * SPLITS + splits
    log = tl.load(logs + row, mask=splits < SPLITS, other=-float("inf"))
    highest = tl.max(log, axis=0)
    if sinks is not None:
        sink = tl.load(sinks + head) * LOG2_E
        highest = tl.maximum(highest, sink)
    highest = tl.where(highest == -float("inf"), 0.0, highest)
    weights = tl.exp2(log - highest)
    total = tl.sum(weights, axis=0)
    if sinks is not None:
        total += tl.exp2(sink - highest)
    mask = (splits < SPLITS)[:, None] & (dims < HEAD_DIM)[None, :]
    values = tl.load(pieces + row[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    result = tl.sum(values * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    target = out + seq * out_stride + head * out_head_stride + dims
    tl.store(target, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
