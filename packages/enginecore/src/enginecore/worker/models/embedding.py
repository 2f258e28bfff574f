"""Embeddings: token ids and positions to the first hidden states."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from collectives import Communicator, VocabParallelEmbedding
from enginecore.worker.models.norms import copy_checked
from enginecore.worker.models.spec import DecoderSpec


class PositionEmbedding(nn.Module):
    """A learned vector for each position; every rank has all of them."""

    def __init__(self, positions: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(positions, size), requires_grad=False)

    def load_weight(self, weight: Tensor) -> None:
        """Take the checkpoint's weight [positions, size]."""
        copy_checked(weight, self.weight)

    def forward(self, positions: Tensor) -> Tensor:
        """Return [tokens, size] of positions int64 [tokens]."""
        return F.embedding(positions, self.weight)


class Embedding(nn.Module):
    """Token embeddings, scaled where the family does it, plus learned positions where it has them."""

    def __init__(self, spec: DecoderSpec, comm: Communicator) -> None:
        super().__init__()
        self.tokens = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, comm=comm)
        self.positions = (
            PositionEmbedding(spec.max_position, spec.hidden_size) if spec.learned_positions else None
        )
        # Gemma was trained with the factor rounded to the type of its weights.
        rounded = torch.tensor(spec.hidden_size**0.5, dtype=self.tokens.weight.dtype, device="cpu")
        self.scale = rounded.item() if spec.scale_embeddings else None

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return hidden states [tokens, hidden] of ids and positions int64 [tokens]."""
        x = self.tokens(ids)
        if self.scale is not None:
            x = x * self.scale
        return x if self.positions is None else x + self.positions(positions)
