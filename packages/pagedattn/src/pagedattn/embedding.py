"""Token embeddings."""

from __future__ import annotations

import torch

from pagedattn.backends import backend_of
from pagedattn.packed import PackedWeight, pack


def embedding(
    ids: torch.Tensor,
    table: PackedWeight | torch.Tensor,
    dtype: torch.dtype,
    *,
    scale: float = 1.0,
    first: int | None = None,
    positions: torch.Tensor | None = None,
    position_table: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Return rows `ids` of `table`, in `dtype`, times `scale`, plus rows `positions` of `position_table`.

    `ids` and `positions` are int64 `[tokens]`, `table` is `[ids, width]`, plain or as `pack_linear` returns
    it for a head, not quantised; `position_table` is `[positions, width]`. The result is `[tokens, width]`.
    Each of scaling and adding rounds once.

    Where a table is cut over ranks, `first` is the id of this rank's first row: ids of other ranks give
    zeros, and the sum over the ranks is what one rank with all rows returns.

    Raises IndexError for an id (without `first`) or a position that has no row, ValueError when shapes, types
    or devices do not fit together.
    """
    if isinstance(table, torch.Tensor):
        table = pack(table, table.dtype, 0)
    if table.quantization is not None:
        raise ValueError(f"a table of embeddings is not quantised, and this one is in {table.quantization}")
    if (positions is None) != (position_table is None):
        raise ValueError("positions and position_table go together")
    for name, given in (("ids", ids), ("positions", positions)):
        if given is not None and (given.ndim != 1 or given.dtype != torch.int64 or len(given) != len(ids)):
            raise ValueError(f"{name} must be int64 [{len(ids)}], not {given.dtype} {list(given.shape)}")
    if position_table is not None and position_table.shape[1:] != (table.inputs,):
        raise ValueError(
            f"position_table must be [positions, {table.inputs}], not {list(position_table.shape)}"
        )
    if ids.device != table.device:
        raise ValueError(f"ids are on {ids.device}, the table is on {table.device}")
    return backend_of(ids.device, backend).embedding(
        ids, table, dtype, scale, first, positions, position_table
    )
