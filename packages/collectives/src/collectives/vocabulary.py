"""Token embedding and language model head, with the vocabulary sharded over the ranks of a communicator."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from collectives.communicator import Communicator
from collectives.layers import Device, ParallelLayer, ParallelLinear
from collectives.sharding import padded_shard


class VocabParallelEmbedding(ParallelLayer):
    """A table of `num_embeddings` vectors of length `dim`, with the vocabulary sharded over the ranks.

    The vocabulary is padded to a multiple of the ranks; padding rows are zero. Each rank looks up the ids it
    holds and gives zeros for others; an all_reduce sums the results.

    Forward: ids [...] (int32 or int64, in [0, num_embeddings), the same on all ranks) -> [..., dim].
    On one rank an id out of range raises IndexError as in torch; on several it gives zeros.
    Weight: [ceil(num_embeddings / ranks), dim].
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        dim: int,
        *,
        comm: Communicator,
        dtype: torch.dtype | None = None,
        device: Device | None = None,
    ) -> None:
        super().__init__(comm)
        self.num_embeddings = num_embeddings
        self.dim = dim
        self._cut = padded_shard(num_embeddings, comm.size, comm.rank)
        self.weight = self._empty(-(-num_embeddings // comm.size), dim, dtype=dtype, device=device)

    @property
    def start(self) -> int:
        """The id of this rank's first row."""
        return self._cut.start

    def load_weight(self, tensor: Tensor) -> None:
        """Take this rank's rows of the full table [num_embeddings, dim]."""
        self._load_shard("weight", self.weight, tensor, (self.num_embeddings, self.dim), self._cut)

    def forward(self, ids: Tensor) -> Tensor:
        if self.comm.size == 1:
            return F.embedding(ids, self.weight)
        elsewhere = (ids < self._cut.start) | (ids >= self._cut.stop)
        vectors = F.embedding((ids - self._cut.start).masked_fill(elsewhere, 0), self.weight)
        return self.comm.all_reduce(vectors.masked_fill_(elsewhere.unsqueeze(-1), 0))


class ParallelLMHead(ParallelLinear):
    """Logits over `num_embeddings` tokens, with the vocabulary sharded as by VocabParallelEmbedding.

    Forward: x [..., dim], the same on all ranks -> [..., num_embeddings] on every rank, by an all_gather. The
    padding is cut off, so that the result is a view of wider rows.
    Weight: [ceil(num_embeddings / ranks), dim].
    """

    def __init__(
        self,
        num_embeddings: int,
        dim: int,
        *,
        bias: bool = False,
        comm: Communicator,
        dtype: torch.dtype | None = None,
        device: Device | None = None,
    ) -> None:
        super().__init__(comm, -(-num_embeddings // comm.size), dim, bias, dtype, device)
        self.num_embeddings = num_embeddings
        self.dim = dim
        self.tied = False
        self._cut = padded_shard(num_embeddings, comm.size, comm.rank)

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Use the weight of `embedding` from now on; it is loaded there. ValueError when the sizes differ."""
        ours = (self.num_embeddings, self.dim, self.comm.size)
        theirs = (embedding.num_embeddings, embedding.dim, embedding.comm.size)
        if ours != theirs:
            raise ValueError(
                f"cannot tie a head to an embedding: (vocabulary, dim, ranks) {ours} and {theirs}"
            )
        self.weight = embedding.weight
        self.tied = True

    def load_weight(self, tensor: Tensor) -> None:
        """Take this rank's rows of the full weight [num_embeddings, dim]. ValueError when tied."""
        if self.tied:
            raise ValueError("ParallelLMHead is tied to an embedding; load the embedding")
        self._load_shard("weight", self.weight, tensor, (self.num_embeddings, self.dim), self._cut)

    def load_bias(self, tensor: Tensor) -> None:
        """Take this rank's entries of the full bias [num_embeddings]."""
        self._load_shard("bias", self._loadable_bias(), tensor, (self.num_embeddings,), self._cut)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.matmul(x, self.weight, self.bias)
        if self.comm.size == 1:
            return logits
        return self.comm.all_gather(logits, dim=-1)[..., : self.num_embeddings]
