"""Paged attention on CUDA devices in Triton.

Launch shapes follow from tensor shapes and the batch's host numbers (`max_query`, `max_length`,
`num_decodes`) alone: nothing waits for the device, and a captured CUDA graph stays right for other
contents of the same tensors as long as those numbers are upper bounds.
"""

from __future__ import annotations

from functools import cache as memoize
from typing import Any

import torch

from pagedattn.backends import ScoreOptions
from pagedattn.batch import AttentionBatch
from pagedattn.triton_backend.kernels import attend_kernel, write_kv_kernel
from pagedattn.triton_backend.split import attend_piece_kernel, merge_pieces_kernel
from pagedattn.triton_backend.tiles import Tiles, choose_tiles, next_power_of_2

__all__ = ["attend", "attend_split", "write_kv"]

# A piece of context shorter than this is not worth a program of its own and a share of the merge.
MIN_PIECE = 256
MAX_SPLITS = 64


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    kv_scales: torch.Tensor | None,
) -> None:
    """See `pagedattn.write_kv`."""
    key, value = _dense_heads(key), _dense_heads(value)
    kv_heads, block_size, head_dim = cache.shape[2:]
    constants: dict[str, Any] = {
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "TILE_HEADS": next_power_of_2(kv_heads),
        "TILE_DIM": next_power_of_2(head_dim),
    }
    with torch.cuda.device_of(cache):
        write_kv_kernel[(slots.shape[0],)](
            cache,
            key,
            value,
            slots,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            **constants,
        )


def attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    options: ScoreOptions,
    out: torch.Tensor,
) -> None:
    """See `pagedattn.attend`."""
    splits = 1
    if batch.num_decodes == batch.num_seqs == query.shape[0] and query.is_cuda:
        context = batch.max_length if options.window is None else min(batch.max_length, options.window)
        splits = choose_splits(batch.num_seqs * cache.shape[2], context, _processors(query.device))
    if splits > 1:
        attend_split(query, cache, batch, options, out, splits)
    else:
        attend_mixed(query, cache, batch, options, out)


def choose_splits(programs: int, context: int, processors: int) -> int:
    """Into how many pieces a context is cut so that `programs` sequences × KV heads fill the device."""
    return max(1, min(2 * processors // programs, context // MIN_PIECE, MAX_SPLITS))


def attend_mixed(
    query: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    options: ScoreOptions,
    out: torch.Tensor,
) -> None:
    """Prefills and decodes together, in one launch."""
    query = _dense_heads(query)
    tiles = _tiles(query, cache, batch.max_query)
    query_tiles = query.shape[0] // tiles.queries + batch.num_seqs
    grid = (query_tiles, cache.shape[2], _head_tiles(query, cache, tiles))
    with torch.cuda.device_of(query):
        attend_kernel[grid](
            out,
            query,
            cache,
            batch.query_starts,
            batch.lengths,
            batch.block_table,
            _float32(options.alibi_slopes),
            _float32(options.sinks),
            batch.num_seqs,
            options.scale,
            options.soft_cap,
            options.window,
            out.stride(0),
            out.stride(1),
            query.stride(0),
            query.stride(1),
            batch.block_table.stride(0),
            **_constants(query, cache, tiles, TILE_QUERIES=tiles.queries),
        )


def attend_split(
    query: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    options: ScoreOptions,
    out: torch.Tensor,
    splits: int,
) -> None:
    """A batch of decodes only, each context cut into `splits` pieces that run side by side."""
    query = _dense_heads(query)
    tokens, q_heads, head_dim = query.shape
    tiles = _tiles(query, cache, max_query=1)
    pieces = torch.empty((tokens, q_heads, splits, head_dim), dtype=torch.float32, device=query.device)
    logs = torch.empty((tokens, q_heads, splits), dtype=torch.float32, device=query.device)
    merge_constants: dict[str, Any] = {
        "SPLITS": splits,
        "HEAD_DIM": head_dim,
        "TILE_SPLITS": next_power_of_2(splits),
        "TILE_DIM": tiles.head_dim,
    }
    with torch.cuda.device_of(query):
        attend_piece_kernel[(tokens, cache.shape[2], _head_tiles(query, cache, tiles) * splits)](
            pieces,
            logs,
            query,
            cache,
            batch.lengths,
            batch.block_table,
            _float32(options.alibi_slopes),
            options.scale,
            options.soft_cap,
            options.window,
            query.stride(0),
            query.stride(1),
            batch.block_table.stride(0),
            **_constants(query, cache, tiles, SPLITS=splits),
        )
        merge_pieces_kernel[(tokens, q_heads)](
            out,
            pieces,
            logs,
            _float32(options.sinks),
            out.stride(0),
            out.stride(1),
            **merge_constants,
        )


def _tiles(query: torch.Tensor, cache: torch.Tensor, max_query: int) -> Tiles:
    return choose_tiles(
        max_query=max_query,
        group=query.shape[1] // cache.shape[2],
        head_dim=cache.shape[4],
        itemsize=cache.dtype.itemsize,
    )


def _head_tiles(query: torch.Tensor, cache: torch.Tensor, tiles: Tiles) -> int:
    """How many programs share the query heads of one KV head."""
    return -(-(query.shape[1] // cache.shape[2]) // tiles.heads)


def _constants(query: torch.Tensor, cache: torch.Tensor, tiles: Tiles, **own: int) -> dict[str, Any]:
    """The compile-time constants of an attention kernel (`own` beside the common), and launch options."""
    kv_heads, block_size, head_dim = cache.shape[2:]
    return own | {
        "KV_HEADS": kv_heads,
        "GROUP": query.shape[1] // kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "TILE_HEADS": tiles.heads,
        "TILE_ROWS": tiles.rows,
        "TILE_KEYS": tiles.keys,
        "TILE_DIM": tiles.head_dim,
        # Of float32: one TF32 product would lose half the digits, three lose next to none.
        "PRECISION": "tf32x3",
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _dense_heads(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with head_dim contiguous, which the kernels take for granted."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _float32(per_head: torch.Tensor | None) -> torch.Tensor | None:
    return None if per_head is None else per_head.to(torch.float32).contiguous()


@memoize
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
