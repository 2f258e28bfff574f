"""Embeddings: token ids and positions to the first hidden states."""

import torch
from torch import Tensor, nn

from collectives import Communicator, VocabParallelEmbedding
from enginecore.worker.models.norms import copy_checked
from enginecore.worker.models.parallel import all_reduce_of
from enginecore.worker.models.spec import DecoderSpec
from pagedattn import PackedWeight, embedding


class PositionEmbedding(nn.Module):
    """A learned vector for each position; every rank has all of them."""

    def __init__(self, positions: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(positions, size), requires_grad=False)

    def load_weight(self, weight: Tensor) -> None:
        """Take the checkpoint's weight [positions, size]."""
        copy_checked(weight, self.weight)


class Embedding(nn.Module):
    """Token embeddings, scaled where the family does it, plus learned positions where it has them."""

    def __init__(self, spec: DecoderSpec, comm: Communicator) -> None:
        super().__init__()
        self.tokens = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, comm=comm)
        self.positions = (
            PositionEmbedding(spec.max_position, spec.hidden_size) if spec.learned_positions else None
        )
        # Gemma was trained with the factor rounded to the type of its weights.
        self._dtype = self.tokens.weight.dtype
        rounded = torch.tensor(spec.hidden_size**0.5, dtype=self._dtype, device="cpu")
        self.scale = rounded.item() if spec.scale_embeddings else 1.0
        self._comm = comm
        self._reduce = all_reduce_of(comm)
        self._table: PackedWeight | Tensor | None = None

    def look_up_in(self, table: PackedWeight | Tensor) -> None:
        """Look tokens up in `table`, this rank's part of the weight, from now on; free the plain weight."""
        self._table = table
        self.tokens.weight = nn.Parameter(self.tokens.weight.new_empty(0), requires_grad=False)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return hidden states [tokens, hidden] of ids and positions int64 [tokens]."""
        x = embedding(
            ids,
            self.tokens.weight if self._table is None else self._table,
            self._dtype,
            scale=self.scale,
            first=None if self._comm.size == 1 else self.tokens.start,
            positions=None if self.positions is None else positions,
            position_table=None if self.positions is None else self.positions.weight,
        )
        self._reduce(x)
        return x
