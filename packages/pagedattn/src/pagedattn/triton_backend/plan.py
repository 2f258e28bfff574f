"""Partition of a batch into programs, from host numbers alone."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagedattn.batch import AttentionBatch
from pagedattn.triton_backend.cascade import prefix_pays
from pagedattn.triton_backend.split import MIN_PIECE, choose_splits
from pagedattn.triton_backend.tiles import Kind, Tiles, choose_tiles

# Sequences with at most this many queries, such as drafts to be verified, are attended to as decodes are.
SHORT_QUERY = 8


class Device(NamedTuple):
    """Device properties that plans depend on: compute capability and number of multiprocessors."""

    capability: tuple[int, int]
    processors: int


class Plan(NamedTuple):
    """The launches of one `attend`; tiles are None where nothing is launched with them.

    The leading `num_short` sequences, of `short_tokens` tokens together, have their contexts cut into
    `splits` pieces of at least `min_piece` positions; with `prefix_splits` above 0 the leading `shared`
    positions are left to the prefix kernel, which cuts them into that many.
    """

    num_short: int
    short_tokens: int
    splits: int
    prefix_splits: int
    shared: int
    min_piece: int
    short: Tiles | None
    long: Tiles | None
    prefix: Tiles | None

    @property
    def parts(self) -> int:
        """Partial results a query of a short sequence; a single one goes straight to the output."""
        return self.prefix_splits + self.splits


def make_plan(
    query: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, window: int | None, device: Device
) -> Plan:
    """The plan for `query` `[tokens, q_heads, head_dim]`; reads shapes, dtypes and host numbers only.

    A batch of short queries is short throughout; otherwise the leading decodes are, and the sequences after
    them go by query tiles. A window leaves a shared prefix unused.
    """
    all_short = batch.max_query <= SHORT_QUERY
    num_short = batch.num_seqs if all_short else batch.num_decodes
    short_tokens = query.shape[0] if all_short else batch.num_decodes
    max_short = batch.max_query if all_short else 1
    short = _tiles("decode", query, cache, max_short, device) if num_short else None
    long = None if all_short else _tiles("prefill", query, cache, batch.max_query, device)
    plan = Plan(num_short, short_tokens, 1, 0, 0, MIN_PIECE, short, long, None)
    if short is None:
        return plan
    context = batch.max_length if window is None else min(batch.max_length, window + max_short - 1)
    if window is None and batch.shared_prefix:
        with_prefix = share_prefix(plan, query, cache, batch, device)
        if _pays(with_prefix, query, cache):
            plan = with_prefix
            context -= plan.shared
    programs = num_short * cache.shape[2] * head_tiles(query, cache, short)
    return plan._replace(splits=choose_splits(programs, context, device.processors))


def head_tiles(query: torch.Tensor, cache: torch.Tensor, tiles: Tiles) -> int:
    """Count the programs that share the query heads of one KV head."""
    return -(-(query.shape[1] // cache.shape[2]) // tiles.heads)


def prefix_query_tiles(plan: Plan, tiles: Tiles) -> int:
    return -(-plan.short_tokens // tiles.queries)


def share_prefix(
    plan: Plan, query: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, device: Device
) -> Plan:
    """`plan` with the batch's shared prefix left to the prefix kernel."""
    tiles = _tiles("prefill", query, cache, plan.short_tokens, device)
    plan = plan._replace(prefix=tiles, shared=batch.shared_prefix)
    programs = prefix_query_tiles(plan, tiles) * cache.shape[2] * head_tiles(query, cache, tiles)
    return plan._replace(prefix_splits=choose_splits(programs, plan.shared, device.processors))


def _pays(shared: Plan, query: torch.Tensor, cache: torch.Tensor) -> bool:
    assert shared.prefix is not None
    kv_heads, head_dim = cache.shape[2], cache.shape[4]
    return prefix_pays(
        num_seqs=shared.num_short,
        query_tiles=prefix_query_tiles(shared, shared.prefix),
        shared=shared.shared,
        position_bytes=2 * kv_heads * head_dim * cache.dtype.itemsize,
        partial_bytes=shared.short_tokens * query.shape[1] * shared.parts * (head_dim + 1) * 4,
    )


def _tiles(kind: Kind, query: torch.Tensor, cache: torch.Tensor, max_query: int, device: Device) -> Tiles:
    return choose_tiles(
        kind,
        max_query=max(max_query, 1),
        group=query.shape[1] // cache.shape[2],
        head_dim=cache.shape[4],
        itemsize=4 if query.dtype == torch.float32 else cache.dtype.itemsize,
        capability=device.capability,
    )
