"""How much of the problem one program of a kernel takes, and with how many warps."""

from __future__ import annotations

from typing import NamedTuple


class Tiles(NamedTuple):
    """Launch shape of an attention kernel.

    A program's matrix rows are `queries` tokens × `heads` of the query heads that share a KV head, padded
    to the power of two `rows`; it reads `keys` positions at a time.
    """

    queries: int
    heads: int
    rows: int
    keys: int
    head_dim: int  # padded to a power of two
    num_warps: int
    num_stages: int


def choose_tiles(*, max_query: int, group: int, head_dim: int, itemsize: int) -> Tiles:
    """Tiles for queries of up to `max_query` tokens; `itemsize` is the cache's bytes per element.

    The sizes are about the largest with which the kernels spill no registers on sm_80 and sm_90 (float32
    with a head_dim of 256 spills up to four).
    """
    padded_dim = max(16, next_power_of_2(head_dim))
    row_bytes = padded_dim * itemsize
    if itemsize == 4:
        most_rows = 32 if padded_dim <= 64 else 16
    else:
        most_rows = 128 if padded_dim <= 128 else 64
    # A matrix product takes at least 16 rows.
    rows = max(16, min(most_rows, next_power_of_2(max_query * group)))
    # Decodes leave rows idle either way, and powers of two are cheaper to divide by.
    heads = min(rows, next_power_of_2(group) if max_query == 1 else group)
    return Tiles(
        queries=rows // heads,
        heads=heads,
        rows=rows,
        keys=64 if row_bytes <= 128 or (row_bytes <= 256 and rows <= 32) else 32,
        head_dim=padded_dim,
        num_warps=8 if rows >= 128 or row_bytes >= 512 or itemsize == 4 else 4,
        num_stages=2,
    )


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
