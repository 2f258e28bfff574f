"""The decoder: one implementation of the transformer that every supported family is a case of."""

from torch import Tensor, nn

from collectives import Communicator, ParallelLMHead, VocabParallelEmbedding
from enginecore.models.layers import Layer, Loader, RMSNorm
from enginecore.models.rope import cos_sin_table
from enginecore.models.spec import DecoderSpec
from pagedattn import AttentionBatch


class Decoder(nn.Module):
    """Token ids to hidden states to logits."""

    def __init__(self, spec: DecoderSpec, comm: Communicator, *, max_positions: int) -> None:
        super().__init__()
        self.spec = spec
        self.embed = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, comm=comm)
        self._order = [Layer(spec, window, comm) for window in spec.windows]
        self.layers = nn.ModuleList(self._order)
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.head = ParallelLMHead(spec.vocab_size, spec.hidden_size, comm=comm)
        if spec.tie_embeddings:
            self.head.tie(self.embed)
        self.table = nn.Buffer(cos_sin_table(spec.rope, max_positions), persistent=False)

    def forward(self, ids: Tensor, positions: Tensor, cache: Tensor, batch: AttentionBatch) -> Tensor:
        """Return normalised hidden states [tokens, hidden] of ids int64 [tokens].

        `cache` is the KV cache of all layers, [layers, blocks, 2, kv_heads, block_size, head_dim].
        """
        x = self.embed(ids)
        residual = x.new_zeros(x.shape)
        rotation = self.table.index_select(0, positions)
        for layer, layer_cache in zip(self._order, cache.unbind(0), strict=True):
            x, residual = layer(x, residual, rotation, layer_cache, batch)
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocab_size] of hidden [n, hidden]."""
        return self.head(hidden)

    def loaders(self) -> dict[str, Loader]:
        """Return, by checkpoint name, where each tensor goes."""
        found: dict[str, Loader] = {
            "model.embed_tokens.weight": self.embed.load_weight,
            "model.norm.weight": self.norm.load_weight,
        }
        if not self.spec.tie_embeddings:
            found["lm_head.weight"] = self.head.load_weight
        for index, layer in enumerate(self._order):
            found |= {f"model.layers.{index}.{name}": to for name, to in layer.loaders().items()}
        return found
