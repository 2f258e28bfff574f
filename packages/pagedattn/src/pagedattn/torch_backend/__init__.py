"""Paged attention in plain torch: the oracle for the other back ends, and the one that runs anywhere."""

from __future__ import annotations

import torch

from pagedattn.backends import ScoreOptions
from pagedattn.batch import AttentionBatch
from pagedattn.layout import FP8
from pagedattn.torch_backend.activation import activation, gelu_and_mul, silu_and_mul
from pagedattn.torch_backend.bitmask import apply_token_bitmask
from pagedattn.torch_backend.copies import copy_blocks
from pagedattn.torch_backend.decode import attend_decodes
from pagedattn.torch_backend.embedding import embedding
from pagedattn.torch_backend.experts import (
    group_by_expert,
    grouped_linear,
    top_k_softmax,
    weighted_sum,
)
from pagedattn.torch_backend.grouped import grouped_matmul
from pagedattn.torch_backend.linear import linear, linear_panel
from pagedattn.torch_backend.norm import layer_norm, rms_norm
from pagedattn.torch_backend.prefill import Span, attend_span
from pagedattn.torch_backend.rotary import rotary
from pagedattn.torch_backend.sampling import top_k_top_p_sample

__all__ = [
    "activation",
    "apply_token_bitmask",
    "attend",
    "copy_blocks",
    "embedding",
    "gelu_and_mul",
    "group_by_expert",
    "grouped_linear",
    "grouped_matmul",
    "layer_norm",
    "linear",
    "linear_panel",
    "rms_norm",
    "rotary",
    "silu_and_mul",
    "top_k_softmax",
    "top_k_top_p_sample",
    "weighted_sum",
    "write_kv",
]


FP8_MAX = 448.0


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    kv_scales: torch.Tensor | None,
) -> None:
    """See `pagedattn.write_kv`."""
    if slots.min() < 0:
        kept = (slots >= 0).nonzero().squeeze(1)
        key, value, slots = key[kept], value[kept], slots[kept]
    block_size = cache.shape[3]
    stored = torch.stack((key, value), dim=1)
    if cache.dtype == FP8:
        scaled = stored.float() if kv_scales is None else stored.float() / kv_scales.unsqueeze(-1)
        # Torch indexes bytes, not float8.
        stored = scaled.clamp_(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
        cache = cache.view(torch.uint8)
    by_slot = cache.permute(0, 3, 1, 2, 4)  # [num_blocks, block_size, 2, kv_heads, head_dim]
    by_slot.index_put_((slots // block_size, slots % block_size), stored)


def attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    options: ScoreOptions,
    out: torch.Tensor,
) -> None:
    """See `pagedattn.attend`."""
    if batch.num_decodes:
        attend_decodes(query, cache, batch, options, out)
    if batch.num_decodes == batch.num_seqs:
        return
    key = ("spans", cache.shape[1:], options.window)
    spans = batch.memo.get(key)
    if spans is None:
        spans = batch.memo[key] = _spans(batch, cache, options.window)
    for span in spans:
        if span.length:
            attend_span(query, cache, span, options, out)
        else:
            out[span.start : span.stop] = 0


def _spans(batch: AttentionBatch, cache: torch.Tensor, window: int | None) -> list[Span]:
    """The sequences after the decodes that have queries."""
    kv_heads, block_size = cache.shape[2:4]
    heads = torch.arange(2 * kv_heads, device=cache.device).unsqueeze(1)
    starts, lengths = batch.query_starts.tolist(), batch.lengths.tolist()
    spans = []
    for seq in range(batch.num_decodes, batch.num_seqs):
        start, stop, length = starts[seq], starts[seq + 1], lengths[seq]
        if start == stop:
            continue
        first = 0 if window is None else max(0, length - (stop - start) + 1 - window)
        blocks = batch.block_table[seq, first // block_size : -(-length // block_size)].long()
        spans.append(Span(start, stop, first, length, (blocks * (2 * kv_heads) + heads).flatten()))
    return spans
