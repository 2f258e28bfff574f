"""Tile sizes and warps of a kernel's programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache as memoize
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["prefill", "decode"]
# (compute capability, kind, padded head_dim, itemsize)
Key = tuple[tuple[int, int], Kind, int, int]

RECORD = Path(__file__).with_name("tuned_tiles.json")


class LaunchShape(NamedTuple):
    """Tunable launch shape: at most `rows` of a matrix product, `keys` a step, and the launch options."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


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


def choose_tiles(
    kind: Kind, *, max_query: int, group: int, head_dim: int, itemsize: int, capability: tuple[int, int]
) -> Tiles:
    """Tiles for queries of up to `max_query` tokens and `group` query heads a KV head.

    `itemsize` is the bytes of a cached element, but 4 wherever queries are float32. For "decode" all
    `max_query` tokens lie in one tile. The launch shape is what was recorded for the device, else
    `rule_of_thumb`; nothing is measured here.
    """
    padded_dim = max(16, next_power_of_2(head_dim))
    recorded = recorded_shapes().get((capability, kind, padded_dim, itemsize))
    shape = recorded or rule_of_thumb(kind, padded_dim, itemsize, capability)
    return fit(kind, shape, max_query=max_query, group=group, padded_dim=padded_dim)


def fit(kind: Kind, shape: LaunchShape, *, max_query: int, group: int, padded_dim: int) -> Tiles:
    """`shape` with no more rows than the queries fill, and queries and heads dealt to the rows."""
    # A matrix product takes at least 16 rows.
    rows = max(16, min(shape.rows, next_power_of_2(max_query * group)))
    if kind == "decode":
        # Decodes leave rows idle either way, and powers of two are cheaper to divide by.
        heads = min(rows // max_query, next_power_of_2(group) if max_query == 1 else group)
    else:
        heads = min(rows, group)
    return Tiles(rows // heads, heads, rows, shape.keys, padded_dim, shape.num_warps, shape.num_stages)


def rule_of_thumb(kind: Kind, padded_dim: int, itemsize: int, capability: tuple[int, int]) -> LaunchShape:
    """About the largest shape with which the kernels spill no registers on sm_80 and sm_90.

    Decodes wait for memory: a step's keys take up to 16 KiB, or 8 KiB of float8, and so do its values.
    Prefills wait for products: as many rows as registers allow, which before sm_90 hold queries and widened
    float8 as well. Since a block table entry is loaded before the keys that it leads to, Triton has
    (num_stages - 1) // 2 steps' keys and values on their way.
    """
    fp8 = itemsize == 1
    before_hopper = capability < (9, 0)
    if itemsize == 4:
        if padded_dim > 128:
            return LaunchShape(16, 16, 8, 2) if before_hopper else LaunchShape(16, 32, 8, 2)
        if padded_dim > 64:
            return LaunchShape(16, 32, 8, 3)
        return LaunchShape(16 if before_hopper else 32, 32, 4, 3)
    if kind == "decode":
        keys = (8 << 10 if fp8 else 16 << 10) // (padded_dim * itemsize)
        most_keys = min(64 if fp8 and before_hopper else 128, padded_dim if before_hopper else 2 * padded_dim)
        return LaunchShape(64 if padded_dim <= 128 else 32, max(32, min(keys, most_keys)), 4, 7 if fp8 else 5)
    if padded_dim > 128:
        return LaunchShape(32 if fp8 else 64, 32, 8, 3)
    if before_hopper and (fp8 or padded_dim > 64 or padded_dim <= 32):
        return LaunchShape(64, 32 if fp8 and padded_dim > 32 else 64, 8, 3)
    return LaunchShape(128, 64, 8, 3)


def parse_record(entries: Iterable[Mapping[str, Any]]) -> dict[Key, LaunchShape]:
    """The launch shapes of a record as tools/tune_attention.py writes it.

    Raises ValueError for two entries with one key.
    """
    shapes: dict[Key, LaunchShape] = {}
    for entry in entries:
        major, minor = entry["capability"]
        key = ((major, minor), entry["kind"], entry["head_dim"], entry["itemsize"])
        if key in shapes:
            raise ValueError(f"the record of tiles has two entries for {key}")
        shapes[key] = LaunchShape(*(entry[name] for name in LaunchShape._fields))
    return shapes


@memoize
def recorded_shapes() -> dict[Key, LaunchShape]:
    return parse_record(json.loads(RECORD.read_text()))


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
