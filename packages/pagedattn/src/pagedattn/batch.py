"""The batch of one step, as attention needs it besides queries and cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """The sequences of one step, whose queries lie one after another in one `[tokens, …]` tensor.

    Tensors, all on the cache's device:

    - `query_starts` int32 `[n + 1]`: sequence i owns query tokens `query_starts[i]:query_starts[i + 1]`;
    - `lengths` int32 `[n]`: tokens of context, the queries included; a query's position follows from
      counting back from the end. 0 marks a row that only fills up the batch: it attends to nothing
      and its output is 0;
    - `block_table` int32 `[n, max_blocks]`: position p lies in block `block_table[i, p // block_size]`.
      Entries that no visible position needs are never read;
    - `slots` int64 `[tokens]`: where each new token's key and value go, block · block_size + offset;
      -1 stores nothing.

    Numbers, known on the host so that nothing waits for the device:

    - `max_query`, `max_length`: upper bounds of query lengths and of `lengths`;
    - `num_decodes`: how many leading sequences have exactly one query token;
    - `shared_prefix`: that many leading positions, whole blocks, lie in the same blocks for all sequences
      that have queries, and before the first query of each; see `find_shared_prefix`. A back end may read
      them once for all. Unlike the bounds it must be exact or less; 0 is always right.

    The object stands for one step: `memo` keeps what a back end derived from the tensors, so that all
    layers of the step share it. Make a new one when the tensors' contents change.
    """

    query_starts: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    max_query: int
    max_length: int
    num_decodes: int
    shared_prefix: int = 0
    memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        num_seqs = self.lengths.shape[0]
        expected = {
            "query_starts": (torch.int32, 1),
            "lengths": (torch.int32, 1),
            "block_table": (torch.int32, 2),
            "slots": (torch.int64, 1),
        }
        for name, (dtype, ndim) in expected.items():
            tensor = getattr(self, name)
            if tensor.dtype != dtype or tensor.ndim != ndim:
                raise ValueError(
                    f"{name} must be a {ndim}-dimensional {dtype} tensor, "
                    f"not {tensor.ndim}-dimensional {tensor.dtype}"
                )
            if tensor.device != self.lengths.device:
                raise ValueError(f"{name} is on {tensor.device}, lengths on {self.lengths.device}")
        if self.query_starts.shape[0] != num_seqs + 1 or self.block_table.shape[0] != num_seqs:
            raise ValueError(
                f"{num_seqs} lengths need {num_seqs + 1} query_starts and {num_seqs} block_table rows, "
                f"not {self.query_starts.shape[0]} and {self.block_table.shape[0]}"
            )
        if not 0 <= self.num_decodes <= num_seqs:
            raise ValueError(f"num_decodes is {self.num_decodes}, of {num_seqs} sequences")
        if self.shared_prefix < 0:
            raise ValueError(f"shared_prefix must be 0 or more, not {self.shared_prefix}")

    @property
    def num_seqs(self) -> int:
        return self.lengths.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.slots.shape[0]


def find_shared_prefix(
    query_lengths: np.ndarray, lengths: np.ndarray, block_table: np.ndarray, block_size: int
) -> int:
    """Count the leading positions that all sequences with queries keep in the same blocks, before any query.

    int `[n]`, int `[n]` and int `[n, max_blocks]` on the host, as in `AttentionBatch`. A multiple of
    `block_size`; 0 when fewer than two sequences have queries.
    """
    asking = np.flatnonzero((query_lengths > 0) & (lengths > 0))
    if len(asking) < 2:
        return 0
    most = int((lengths[asking] - query_lengths[asking]).min()) // block_size
    table = block_table[asking, :most]
    differs = (table != table[0]).any(axis=0)
    return (int(differs.argmax()) if differs.any() else most) * block_size


def build_batch(
    query_lengths: Sequence[int],
    lengths: Sequence[int],
    block_table: Sequence[Sequence[int]] | np.ndarray,
    *,
    block_size: int,
    device: torch.device | str = "cpu",
) -> AttentionBatch:
    """An AttentionBatch from host numbers: the new tokens are the last `query_lengths[i]` of `lengths[i]`.

    `block_table` rows may differ in length, and hold -1 where no query looks. Raises ValueError when a
    sequence has more queries than tokens or fewer blocks than its tokens need.
    """
    counts, totals = _integers("query_lengths", query_lengths), _integers("lengths", lengths)
    if counts.shape != totals.shape or len(block_table) != len(counts):
        raise ValueError(f"{len(counts)} query lengths, {len(totals)} lengths, {len(block_table)} table rows")
    if (counts < 0).any() or (counts > totals).any():
        seq = int(np.argmax((counts < 0) | (counts > totals)))
        raise ValueError(f"sequence {seq} has {counts[seq]} queries in a context of {totals[seq]}")

    table = np.full((len(counts), max(map(len, block_table), default=0)), -1, dtype=np.int32)
    for seq, blocks in enumerate(block_table):
        if len(blocks) * block_size < totals[seq]:
            raise ValueError(
                f"sequence {seq} of {totals[seq]} tokens needs {-(-totals[seq] // block_size)} "
                f"blocks of {block_size}, not {len(blocks)}"
            )
        table[seq, : len(blocks)] = blocks

    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    seqs = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(starts[-1]) - starts[seqs] + (totals - counts)[seqs]
    slots = table[seqs, positions // block_size].astype(np.int64) * block_size + positions % block_size
    if (slots < 0).any():
        seq = int(seqs[np.argmax(slots < 0)])
        raise ValueError(f"sequence {seq} has no block for a new token in {table[seq].tolist()}")
    not_decode = np.flatnonzero(counts != 1)
    return AttentionBatch(
        query_starts=torch.from_numpy(starts).to(device),
        lengths=torch.from_numpy(totals).to(device),
        block_table=torch.from_numpy(table).to(device),
        slots=torch.from_numpy(slots).to(device),
        max_query=int(counts.max(initial=0)),
        max_length=int(totals.max(initial=0)),
        shared_prefix=find_shared_prefix(counts, totals, table, block_size),
        num_decodes=int(not_decode[0]) if len(not_decode) else len(counts),
    )


def _integers(name: str, numbers: Sequence[int]) -> np.ndarray:
    given = np.asarray(numbers)
    if given.size and given.dtype.kind not in "iu":
        raise ValueError(f"{name} must be whole numbers, not {given.dtype}")
    return given.astype(np.int32)
