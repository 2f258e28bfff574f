"""All decodes of a step (one query each) in a few batched passes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from pagedattn.backends import ScoreOptions
from pagedattn.batch import AttentionBatch
from pagedattn.layout import FP8
from pagedattn.torch_backend.softmax import softmax_attention

# A chunk's gathered keys and values should still be in the CPU's cache when they are multiplied.
CHUNK_BYTES = 4 << 20
# Gathering this much padding costs about as much as the calls that one more chunk takes.
WASTE_BYTES = 1 << 19


class DecodeChunk(NamedTuple):
    """Sequences of like length, padded to `width` blocks each; `n` of them, L = width · block_size.

    The gathered keys and values are `[2, n, kv_heads, L, head_dim]`.
    """

    start: int  # of the chunk's sequences in the plan's order
    stop: int
    tiles: torch.Tensor  # int64 [2 * n * kv_heads * width]: the [block_size, head_dim] tiles to gather
    hidden: torch.Tensor  # int64: gathered rows [head_dim] that no query may see
    mask: torch.Tensor  # float32 [n, L]: 0 where visible, -inf where hidden
    distance: torch.Tensor  # float32 [n, L]: key position - query position


class DecodePlan(NamedTuple):
    """Decode plan that all layers of one step share, made from block table and lengths alone."""

    order: torch.Tensor  # int64 [num_decodes]: sequences by number of blocks, most first
    chunks: list[DecodeChunk]
    scratch: torch.Tensor  # [elements] of the largest chunk, in the cache's dtype (float8 as uint8)
    widened: torch.Tensor | None  # the same in float32, if the cache's dtype is another


def attend_decodes(
    query: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    options: ScoreOptions,
    out: torch.Tensor,
) -> None:
    """Attention of the first `num_decodes` tokens; arguments as in `pagedattn.attend`."""
    key = ("decode", cache.shape[1:], cache.dtype, options.window)
    plan = batch.memo.get(key)
    if plan is None:
        plan = batch.memo[key] = plan_decode(batch, cache, options.window)
    kv_heads, block_size, head_dim = cache.shape[2:]
    group = query.shape[1] // kv_heads
    # Torch gathers bytes, not float8.
    tiles = (cache.view(torch.uint8) if cache.dtype == FP8 else cache).view(-1, block_size * head_dim)
    # The query heads that share a KV head become rows of one matrix product.
    queries = query.index_select(0, plan.order).view(-1, group, head_dim).float()
    results = torch.empty_like(queries)
    for chunk in plan.chunks:
        elements = chunk.tiles.shape[0] * tiles.shape[1]
        gathered = plan.scratch[:elements].view(-1, tiles.shape[1])
        torch.index_select(tiles, 0, chunk.tiles, out=gathered)
        if plan.widened is not None:
            gathered = plan.widened[:elements].copy_(plan.scratch[:elements].view(cache.dtype))
        # Hidden slots may hold NaN, which a weight of 0 would not silence.
        gathered.view(-1, head_dim).index_fill_(0, chunk.hidden, 0)
        by_head = gathered.view(2, chunk.stop - chunk.start, kv_heads, -1)
        if options.kv_scales is not None:
            by_head *= options.kv_scales.view(2, 1, kv_heads, 1)
        keys, values = by_head.view(2, (chunk.stop - chunk.start) * kv_heads, -1, head_dim)
        rows = slice(chunk.start * kv_heads, chunk.stop * kv_heads)
        bias, sinks = _bias(chunk, options, kv_heads, group)
        softmax_attention(queries[rows], keys, values, bias, options, sinks, out=results[rows])
    out.index_copy_(0, plan.order, results.view(-1, *query.shape[1:]).to(out.dtype))


def _bias(
    chunk: DecodeChunk, options: ScoreOptions, kv_heads: int, group: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`[n * kv_heads, 1 or group, L]` to add to the scores, and the sinks as `[n * kv_heads, group, 1]`."""
    count, width = chunk.mask.shape
    bias = chunk.mask.view(count, 1, 1, width)
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.float().view(1, kv_heads, group, 1)
        bias = bias + slopes * chunk.distance.view(count, 1, 1, width)
    sinks = None
    if options.sinks is not None:
        sinks = options.sinks.float().view(1, kv_heads, group, 1).expand(count, -1, -1, -1).flatten(0, 1)
    return bias.expand(-1, kv_heads, -1, -1).flatten(0, 1), sinks


def plan_decode(batch: AttentionBatch, cache: torch.Tensor, window: int | None) -> DecodePlan:
    """Sort the decodes by length and cut them into chunks of little padding."""
    kv_heads, block_size, head_dim = cache.shape[2:]
    table = batch.block_table[: batch.num_decodes].cpu().numpy()
    lengths = batch.lengths[: batch.num_decodes].cpu().numpy().astype(np.int64)
    first = np.maximum(lengths - window, 0) if window is not None else np.zeros_like(lengths)
    first_block = first // block_size
    num_blocks = np.maximum(-(-lengths // block_size) - first_block, 1)
    order = np.argsort(-num_blocks, kind="stable")

    block_bytes = 2 * kv_heads * block_size * head_dim * torch.float32.itemsize
    chunks = []
    for start, stop in _cut(num_blocks[order].tolist(), block_bytes):
        seqs = order[start:stop]
        width = int(num_blocks[seqs[0]])
        # Padding repeats a sequence's last block: any of its own will do, since it is hidden.
        columns = first_block[seqs, None] + np.minimum(np.arange(width), num_blocks[seqs, None] - 1)
        blocks = np.where(lengths[seqs, None] > 0, table[seqs[:, None], columns], 0)
        positions = first_block[seqs, None] * block_size + np.arange(width * block_size)
        visible = (positions >= first[seqs, None]) & (positions < lengths[seqs, None])
        chunks.append(_make_chunk(start, stop, blocks, positions - lengths[seqs, None] + 1, visible, cache))
    largest = max(chunk.tiles.shape[0] for chunk in chunks) * block_size * head_dim
    scratch_dtype = torch.uint8 if cache.dtype == FP8 else cache.dtype
    scratch = torch.empty(largest, dtype=scratch_dtype, device=cache.device)
    return DecodePlan(
        order=torch.from_numpy(order).to(cache.device),
        chunks=chunks,
        scratch=scratch,
        widened=None if cache.dtype == torch.float32 else torch.empty_like(scratch, dtype=torch.float32),
    )


def _make_chunk(
    start: int, stop: int, blocks: np.ndarray, distance: np.ndarray, visible: np.ndarray, cache: torch.Tensor
) -> DecodeChunk:
    kv_heads = cache.shape[2]
    heads = np.arange(2 * kv_heads).reshape(2, 1, kv_heads, 1)
    tiles = blocks[None, :, None, :].astype(np.int64) * (2 * kv_heads) + heads
    hidden = np.flatnonzero(
        np.broadcast_to(~visible[None, :, None], (2, len(blocks), kv_heads, visible.shape[1]))
    )
    # A sequence of length 0 sees only zeros; masking all of them would give 0 / 0.
    mask = np.where(visible | ~visible.any(axis=1, keepdims=True), 0, -np.inf)
    return DecodeChunk(
        start=start,
        stop=stop,
        tiles=torch.from_numpy(tiles.reshape(-1)).to(cache.device),
        hidden=torch.from_numpy(hidden).to(cache.device),
        mask=torch.from_numpy(mask.astype(np.float32)).to(cache.device),
        distance=torch.from_numpy(distance.astype(np.float32)).to(cache.device),
    )


def _cut(num_blocks: list[int], block_bytes: int) -> list[tuple[int, int]]:
    """Ranges of a descending list, so that a range's padding and its padded size stay small."""
    ranges = []
    start = waste = 0
    for index, count in enumerate(num_blocks):
        width = num_blocks[start]
        waste += (width - count) * block_bytes
        size = (index - start + 1) * width * block_bytes
        if index > start and (waste > WASTE_BYTES or size > CHUNK_BYTES):
            ranges.append((start, index))
            start, waste = index, 0
    ranges.append((start, len(num_blocks)))
    return ranges
