"""Token embeddings in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from pagedattn.packed import PackedWeight


def embedding(
    ids: torch.Tensor,
    table: PackedWeight,
    dtype: torch.dtype,
    scale: float,
    first: int | None,
    positions: torch.Tensor | None,
    position_table: torch.Tensor | None,
) -> torch.Tensor:
    """See `pagedattn.embedding`."""
    elsewhere = None
    if first is not None and not table.outputs:
        return ids.new_zeros((len(ids), table.inputs), dtype=dtype)
    if first is not None:
        elsewhere = (ids < first) | (ids >= first + table.outputs)
        ids = (ids - first).masked_fill(elsewhere, 0)
    # The lookup in a plain table does not wait for a device, as a check of the ids would.
    x = table.rows(ids) if table.panel else F.embedding(ids, table.data)
    if scale != 1:
        x = x.to(torch.promote_types(dtype, torch.float32)) * scale
    x = x.to(dtype)
    if positions is not None and position_table is not None:
        x = (x + position_table[positions]).to(dtype)
    return x if elsewhere is None else x.masked_fill(elsewhere.unsqueeze(-1), 0)
