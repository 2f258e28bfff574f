# ruff: noqa: ANN001, ANN201 (Triton infers the types of kernel arguments)
"""Copying KV cache blocks: one Triton launch on a device, one transfer to the host or from it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pagedattn.copies import chained

TILE = 2048
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit
def copy_blocks_kernel(
    target,
    source,
    pairs,
    target_blocks,
    source_blocks,
    words,
    TARGET_LISTED: tl.constexpr,
    SOURCE_LISTED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (pairs, layers, word tiles of a block).

    On a side that is not listed, block i of the tensor belongs to pair i.
    """
    pair = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    from_block, to_block = pair, pair
    if SOURCE_LISTED:
        from_block = tl.load(pairs + 2 * pair)
    if TARGET_LISTED:
        to_block = tl.load(pairs + 2 * pair + 1)
    word = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = word < words
    values = tl.load(source + (layer * source_blocks + from_block) * words + word, mask=inside)
    tl.store(target + (layer * target_blocks + to_block) * words + word, values, mask=inside)


def copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """See `pagedattn.copy_blocks`."""
    source, target = _as_words(source), _as_words(target)
    device = source.device if target.device.type == "cpu" else target.device
    on_device = pairs.contiguous().to(device, non_blocking=True)
    if source.device == target.device and not chained(source, target, pairs):
        _launch(source, target, on_device, source_listed=True, target_listed=True)
        return
    count = pairs.shape[0]
    staging = torch.empty((source.shape[0], count, source.shape[2]), dtype=source.dtype, device=device)
    if source.device == device:
        _launch(source, staging, on_device, source_listed=True, target_listed=False)
    else:
        host = _pinned_like(staging)
        for place, block in enumerate(pairs[:, 0].tolist()):
            host[:, place] = source[:, block]
        # Pinned memory is not reused before the stream has read it: torch's allocator sees to that.
        staging.copy_(host, non_blocking=True)
    if target.device == device:
        _launch(staging, target, on_device, source_listed=False, target_listed=True)
    else:
        host = _pinned_like(staging)
        host.copy_(staging, non_blocking=True)
        torch.cuda.current_stream(device).synchronize()
        for place, block in enumerate(pairs[:, 1].tolist()):
            target[:, block] = host[:, place]


def _launch(
    source: torch.Tensor,
    target: torch.Tensor,
    pairs: torch.Tensor,
    *,
    source_listed: bool,
    target_listed: bool,
) -> None:
    layers, source_blocks, words = source.shape
    constants: dict[str, Any] = {
        "TARGET_LISTED": target_listed,
        "SOURCE_LISTED": source_listed,
        "TILE": TILE,
    }
    with torch.cuda.device_of(pairs):
        copy_blocks_kernel[(pairs.shape[0], layers, triton.cdiv(words, TILE))](
            target,
            source,
            pairs,
            target.shape[1],
            source_blocks,
            words,
            **constants,
        )


def _as_words(cache: torch.Tensor) -> torch.Tensor:
    """`[layers, num_blocks, words]` of the widest integers that a block is made of."""
    by_block = cache.view(*cache.shape[:2], -1).view(torch.uint8)
    width = next(width for width in _WORDS if by_block.shape[2] % width == 0)
    return by_block.view(_WORDS[width])


def _pinned_like(staging: torch.Tensor) -> torch.Tensor:
    return torch.empty(staging.shape, dtype=staging.dtype, pin_memory=True)
