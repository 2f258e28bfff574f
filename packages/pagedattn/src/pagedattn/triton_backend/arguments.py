"""Arguments of the attention kernels, in groups. Fields in capitals are constants at compile time."""

from __future__ import annotations

from typing import Any, NamedTuple


class Rows(NamedTuple):
    """Queries or results, `[tokens, q_heads, HEAD_DIM]` with HEAD_DIM contiguous."""

    data: Any
    token_stride: Any
    head_stride: Any


class Cache(NamedTuple):
    """One layer's cache, `[num_blocks, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM]`.

    FP8 is None, or how float8_e4m3fn codes (then `data` is uint8) are widened: "hardware" or "integer".
    """

    data: Any
    scales: Any  # float32 [2, KV_HEADS] of a float8 cache, or None for 1
    KV_HEADS: Any
    GROUP: Any  # query heads that share a KV head
    BLOCK_SIZE: Any
    HEAD_DIM: Any
    FP8: Any


class Sequences(NamedTuple):
    """The tensors of an AttentionBatch that say whose queries and keys are where."""

    query_starts: Any
    lengths: Any
    block_table: Any


class Scoring(NamedTuple):
    """Scoring options of query · key; see `pagedattn.attend`. None where an option is off."""

    scale: Any
    soft_cap: Any
    window: Any
    slopes: Any  # float32 [q_heads]
    sinks: Any  # float32 [q_heads]


class Partials(NamedTuple):
    """Softmaxes over parts of a context, to be merged.

    `means` float32 `[tokens, q_heads, parts, HEAD_DIM]` are each normalised by themselves; `logs` float32
    `[tokens, q_heads, parts]` are the log2 of their denominators, -inf where a part is empty and its means
    are unwritten.
    """

    means: Any
    logs: Any


class Tile(NamedTuple):
    """Tile of one program: QUERIES tokens × HEADS query heads of one KV head, padded to ROWS rows of a
    matrix, against KEYS positions at a time. DIM is HEAD_DIM padded to a power of two."""

    QUERIES: Any
    HEADS: Any
    ROWS: Any
    KEYS: Any
    DIM: Any
