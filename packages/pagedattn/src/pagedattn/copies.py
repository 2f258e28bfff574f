"""Copying blocks of a KV cache: within it, to another one, to host memory and back."""

from __future__ import annotations

import torch

from pagedattn.backends import backend_of
from pagedattn.layout import CACHE_DTYPE_NAMES, CACHE_DTYPES


def copy_blocks(
    source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor, *, backend: str | None = None
) -> None:
    """Copy blocks of all layers from `source` to `target`, in place.

    Both are contiguous `[layers, num_blocks, 2, kv_heads, block_size, head_dim]` of one dtype, as
    `allocate` makes them, that differ in num_blocks at most; they may be the same tensor, and one may be
    on a device and the other on the host. `pairs` is int64 `[n, 2]` on the CPU: source block, target
    block. All sources are read before any target is written, so a block may be both, in other pairs.

    Between tensors on one device the copy is ordered with the stream's other work and waits for nothing.
    A copy to the host returns when the data is there.

    Raises ValueError when shapes, dtypes or devices do not fit together, when a block does not exist, and
    when two pairs have one target.
    """
    _check_caches(source, target)
    _check_pairs(source, target, pairs)
    if pairs.shape[0]:
        device = target.device if source.device.type == "cpu" else source.device
        backend_of(device, backend).copy_blocks(source, target, pairs)


def chained(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> bool:
    """Whether a block that is read is also written, so that the order of the copies matters."""
    if source.data_ptr() != target.data_ptr() or source.device != target.device:
        return False
    sources, targets = pairs.unbind(1)
    return not set(sources.tolist()).isdisjoint(targets.tolist())


def _check_caches(source: torch.Tensor, target: torch.Tensor) -> None:
    for name, cache in (("source", source), ("target", target)):
        if cache.ndim != 6 or cache.shape[2] != 2 or not cache.is_contiguous():
            raise ValueError(
                f"{name} must be a contiguous [layers, num_blocks, 2, kv_heads, block_size, head_dim], "
                f"not {list(cache.shape)} with strides {list(cache.stride())}"
            )
    if source.shape[0] != target.shape[0] or source.shape[2:] != target.shape[2:]:
        raise ValueError(
            f"source {list(source.shape)} and target {list(target.shape)} may differ in num_blocks only"
        )
    if source.dtype != target.dtype or source.dtype not in CACHE_DTYPES:
        raise ValueError(
            f"caches hold one of {CACHE_DTYPE_NAMES}; source is {source.dtype}, target {target.dtype}"
        )
    if source.device != target.device and "cpu" not in (source.device.type, target.device.type):
        raise ValueError(f"source is on {source.device}, target on {target.device}: one must be on the CPU")


def _check_pairs(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype != torch.int64 or pairs.device.type != "cpu":
        raise ValueError(
            f"pairs must be int64 [n, 2] on the CPU, not {pairs.dtype} {list(pairs.shape)} on {pairs.device}"
        )
    for name, cache, ids in zip(("source", "target"), (source, target), pairs.T.tolist()):
        if ids and not 0 <= min(ids) <= max(ids) < cache.shape[1]:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise ValueError(f"{name} block {wrong} does not exist: there are {cache.shape[1]}, from 0 on")
    targets = pairs[:, 1].tolist()
    if len(set(targets)) < len(targets):
        twice = next(block for block in targets if targets.count(block) > 1)
        raise ValueError(
            f"target block {twice} occurs in {targets.count(twice)} pairs; it can hold one block"
        )
