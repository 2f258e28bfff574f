"""Input buffers of the running requests: a row of tokens and of block ids each."""

import numpy as np
import torch
from torch import Tensor

from batchsched import AdmittedRow
from enginecore.executor.step import SampledTokens
from enginecore.worker.upload import upload_integers
from kvblocks import TableChanges


class InputBuffers:
    """Fixed rows that only deltas change; indexing them by a step's rows gives the batch."""

    def __init__(self, max_rows: int, max_len: int, max_blocks: int, device: torch.device) -> None:
        # From numpy, whose zeroed memory takes none until it is written.
        self.tokens = torch.from_numpy(np.zeros((max_rows, max_len), np.int32)).to(device)
        self.host_tokens = self.tokens.numpy() if self.tokens.device.type == "cpu" else None
        """The same memory, where the host has it: numpy indexes small arrays faster than torch."""
        self.block_tables = torch.from_numpy(np.zeros((max_rows, max_blocks), np.int32)).to(device)
        on_host = self.block_tables.device.type == "cpu"
        self.host_tables = (
            self.block_tables.numpy() if on_host else np.zeros((max_rows, max_blocks), np.int32)
        )
        """What `block_tables` holds, readable without waiting for the device."""

    def fill(self, admitted: AdmittedRow) -> None:
        """Write the tokens of a row that is admitted."""
        tokens = torch.from_numpy(np.array(admitted.tokens, np.int32))
        self.tokens[admitted.row, : len(tokens)] = tokens.to(self.tokens.device, non_blocking=True)

    def append(self, rows: Tensor, positions: Tensor, sampled: Tensor) -> None:
        """Write the sampled ids [k] at `positions` of `rows`, without reading them back; 0 for NOT_FINITE."""
        self.tokens[rows, positions] = sampled.to(torch.int32).clamp(min=0)

    def append_from_host(self, sampled: SampledTokens) -> None:
        """Write tokens that another stage sampled."""
        self.append(*upload_integers(sampled, self.tokens.device))

    def change_tables(self, changes: TableChanges) -> None:
        """Set new entries of the block tables."""
        if not len(changes.rows):
            return
        rows, indices, blocks = torch.from_numpy(np.stack(changes)).to(
            self.block_tables.device, non_blocking=True
        )
        self.block_tables[rows.long(), indices.long()] = blocks
        if self.block_tables.device.type != "cpu":
            self.host_tables[changes.rows, changes.indices] = changes.blocks
