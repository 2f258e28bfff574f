"""Model inputs of a step, built without a Python loop over rows or tokens."""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from enginecore.worker.upload import upload_integers
from pagedattn import AttentionBatch, find_shared_prefix


class ModelInputs(NamedTuple):
    """A step as the model sees it: sequences that decode come first."""

    order: np.ndarray
    """int64[n]: where in the plan each sequence of the batch is: decoding rows, ascending, come first."""
    ids: Tensor
    """int64[tokens]."""
    positions: Tensor
    """int64[tokens]."""
    batch: AttentionBatch
    rows: Tensor
    """int32[n]: the row of each sequence."""
    last: np.ndarray
    """int32[n], on the host: where each sequence's last token lies."""
    query_starts: np.ndarray
    """int32[n + 1], on the host."""


def build_inputs(
    rows: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    *,
    tokens: Tensor,
    host_tokens: np.ndarray | None,
    block_tables: Tensor,
    host_tables: np.ndarray,
    block_size: int,
) -> ModelInputs:
    """Return the inputs for running `counts` tokens of each of `rows` from position `starts` on.

    A row may stand there several times, with positions that follow one another; see `runner.drafts`.
    `tokens` is int32 [max_rows, max_len] and `block_tables` int32 [max_rows, max_blocks], both on the
    model's device; `host_tokens` is the same memory where that is a CPU, and `host_tables` holds the same
    block tables. Nothing is read back from the device.
    """
    # Where all rows of a range decode, as in most steps, their block tables need not be gathered.
    order = np.lexsort((rows, counts > 1))
    rows, starts, counts = rows[order], starts[order], counts[order]
    query_starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=query_starts[1:])
    total = int(query_starts[-1])
    lengths = starts + counts
    token_rows = np.repeat(rows, counts)
    positions = np.arange(total) + np.repeat(starts - query_starts[:-1], counts)
    slots = host_tables[token_rows, positions // block_size] * block_size + positions % block_size

    device = tokens.device
    d_rows, d_lengths, d_starts = upload_integers([rows, lengths, query_starts], device, np.int32)
    if host_tokens is None:
        d_positions, d_slots, d_token_rows = upload_integers([positions, slots, token_rows], device)
        ids = tokens[d_token_rows, d_positions].long()
    else:
        d_positions, d_slots, ids = upload_integers(
            [positions, slots, host_tokens[token_rows, positions]], device
        )
    max_length = int(lengths.max())
    used_blocks = -(-max_length // block_size)
    batch = AttentionBatch(
        query_starts=d_starts,
        lengths=d_lengths,
        block_table=_table(block_tables, rows, d_rows, used_blocks),
        slots=d_slots,
        max_query=int(counts.max()),
        max_length=max_length,
        num_decodes=int((counts == 1).sum()),
        shared_prefix=_shared_prefix(rows, counts, lengths, host_tables, block_size),
    )
    return ModelInputs(order, ids, d_positions, batch, d_rows, query_starts[1:] - 1, query_starts)


def _table(tables: Tensor, rows: np.ndarray, device_rows: Tensor, width: int) -> Tensor:
    """Return the first `width` entries of the rows' block tables: a view where the rows are neighbours."""
    first = int(rows[0])
    if (rows == np.arange(first, first + len(rows))).all():
        return tables[first : first + len(rows), :width]
    return tables[device_rows, :width]


def _shared_prefix(
    rows: np.ndarray, counts: np.ndarray, lengths: np.ndarray, tables: np.ndarray, block_size: int
) -> int:
    # Nearly always the first blocks differ, and the tables need not be gathered. A row alone shares nothing
    # with its drafts, as reading keys for several sequences at once adds up in another order.
    if len(rows) < 2 or (tables[rows, 0] != tables[rows[0], 0]).any() or (rows == rows[0]).all():
        return 0
    most = int((lengths - counts).min()) // block_size
    return find_shared_prefix(counts, lengths, tables[rows, :most], block_size)
