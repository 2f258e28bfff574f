"""Token embeddings by a C kernel, which reads rows of a head's packed weight too."""

from __future__ import annotations

import torch

from pagedattn import torch_backend
from pagedattn.cpu_backend.arguments import EMBEDDING, TYPES, address, launch
from pagedattn.cpu_backend.ops import FLOATS
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
    """See `pagedattn.embedding`. Dtypes that the kernel does not know go to torch."""
    types = [dtype, table.dtype] + ([] if position_table is None else [position_table.dtype])
    if any(given not in FLOATS for given in types) or not table.inputs:
        return torch_backend.embedding(ids, table, dtype, scale, first, positions, position_table)
    ids = ids.contiguous()
    positions = None if positions is None else positions.contiguous()
    position_table = None if position_table is None else position_table.contiguous()
    data = table.data if table.panel else table.data.contiguous()
    out = torch.empty((len(ids), table.inputs), dtype=dtype, device="cpu")
    error = launch(
        EMBEDDING,
        ids.data_ptr(),
        address(positions),
        data.data_ptr(),
        address(position_table),
        out.data_ptr(),
        len(ids),
        table.inputs,
        first or 0,
        table.outputs,
        0 if position_table is None else len(position_table),
        table.panel,
        first is not None,
        TYPES[dtype],
        TYPES[table.dtype],
        0 if position_table is None else TYPES[position_table.dtype],
        torch.get_num_threads(),
        scale,
    )
    if error:
        raise embedding_error(error, table.outputs, 0 if position_table is None else len(position_table))
    return out


def embedding_error(error: int, rows: int, position_rows: int) -> IndexError:
    """Return what `launch` says of EMBEDDING."""
    token, kind = divmod(error - 1, 2)
    name, table, size = ("position", "position_table", position_rows) if kind else ("id", "table", rows)
    return IndexError(f"the {name} of token {token} has no row: {table} has rows for 0 to {size - 1}")
