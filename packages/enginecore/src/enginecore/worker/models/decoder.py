"""The decoder: one implementation of the transformer that every supported family is a case of."""

import itertools
import re

import torch
from torch import Tensor, nn

from collectives import ExpertDispatcher, ParallelLMHead
from enginecore.worker.models.embedding import Embedding
from enginecore.worker.models.experts import SparseFeedForward
from enginecore.worker.models.layers import Layer, Loader, norm_loaders
from enginecore.worker.models.norms import hidden_norm
from enginecore.worker.models.parallel import ModelParallel
from enginecore.worker.models.rope import RotaryTables
from enginecore.worker.models.spec import DecoderSpec
from pagedattn import AttentionBatch


class Decoder(nn.Module):
    """Token ids to hidden states to logits, or the stage of it that has some of the layers.

    The first stage begins with the embedding, the last ends with norm and head; between stages hidden states
    are handed on.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        parallel: ModelParallel,
        *,
        max_positions: int,
        layers: range | None = None,
    ) -> None:
        """Make an empty model; `layers` is what this stage has, all of them if None.

        Raises:
            ValueError: `layers` is no range of neighbouring layers of `spec`, or the sizes cannot be cut for
                the ranks.
        """
        super().__init__()
        held = range(spec.num_layers) if layers is None else layers
        if not held or held.step != 1 or held.start < 0 or held.stop > spec.num_layers:
            raise ValueError(f"a stage has some of the {spec.num_layers} layers in order, not {held}")
        self.spec = spec
        self.held = held
        """The layers of this stage."""
        self.first = held.start == 0
        self.last = held.stop == spec.num_layers
        tp = parallel.tp
        self.is_sharded = tp.size > 1 or parallel.ep is not None
        """Whether ranks exchange results within layers."""
        self.embed = Embedding(spec, tp) if self.first else None
        self._order = [Layer(spec, index, parallel) for index in held]
        self.layers = nn.ModuleList(self._order)
        self.rotary = RotaryTables(spec.ropes[held.start : held.stop], max_positions)
        self.norm = hidden_norm(spec) if self.last else None
        self.head = ParallelLMHead(spec.vocab_size, spec.hidden_size, comm=tp) if self.last else None
        if self.head is not None and self.embed is not None and spec.tie_embeddings:
            self.head.tie(self.embed.tokens)

    @property
    def kv_heads(self) -> int:
        """KV heads of each layer that this rank holds, and needs a cache for."""
        return self._order[0].attention.kv_heads

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights and tables that this rank holds."""
        held = itertools.chain(self.parameters(), self.buffers())
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    @property
    def step_width(self) -> int:
        """Elements for each token that a step holds at most at once, about, beside the logits."""
        return max(layer.step_width for layer in self._order)

    def forward(
        self,
        inputs: Tensor,
        positions: Tensor,
        cache: Tensor,
        batch: AttentionBatch,
        rotation_lengths: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states [tokens, hidden], on the last stage normalised.

        `inputs` is ids int64 [tokens] on the first stage, the hidden states that the stage before returned on
        others. `cache` is the KV cache of this stage's layers, [layers, blocks, 2, kv_heads, block_size,
        head_dim]. `rotation_lengths` int64 [tokens] is for models with a `dynamic_length`: the length of each
        token's sequence, by which it is rotated.
        """
        outputs = self.run_layers(self.layer_inputs(inputs, positions, rotation_lengths), cache, batch)
        return self.hidden(outputs)

    def layer_inputs(
        self, inputs: Tensor, positions: Tensor, rotation_lengths: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return what `run_layers` takes, all [tokens, …]: `inputs`, positions, rows of rotations."""
        return inputs, positions, *self.rotary.dynamic_rows(positions, rotation_lengths)

    def run_layers(
        self, inputs: tuple[Tensor, ...], cache: Tensor, batch: AttentionBatch
    ) -> tuple[Tensor, ...]:
        """Run this stage's embedding, if it is the first, and its layers; return what `hidden` takes.

        It is free of operations that `pagedattn.capture` cannot record.
        """
        x, positions, *dynamic_rows = inputs
        if self.embed is not None:
            x = self.embed(x, positions)
        residual: Tensor | None = None
        rotations = self.rotary(positions, dynamic_rows)
        for layer, rotation, layer_cache in zip(self._order, rotations, cache.unbind(0), strict=True):
            x, residual = layer(x, residual, rotation, layer_cache, batch)
        assert residual is not None
        return (x, residual) if self.norm is None else (self.norm.add(x, residual)[0],)

    def hidden(self, outputs: tuple[Tensor, ...]) -> Tensor:
        """Return hidden states [tokens, hidden] of what `run_layers` returned."""
        return outputs[0] if len(outputs) == 1 else outputs[0] + outputs[1]

    def run_without_tokens(self) -> None:
        """Run the experts of this rank on the tokens of others, where it has none of its own."""
        for layer in self._order:
            if isinstance(layer.mlp, SparseFeedForward):
                layer.mlp.run_without_tokens()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocab_size] of hidden [n, hidden].

        Raises:
            ValueError: this is not the last stage.
        """
        if self.head is None:
            raise ValueError(f"layers {self.held} are not the last stage, which has the head")
        logits = self.head(hidden)
        cap = self.spec.logit_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def expert_loads(self) -> Tensor | None:
        """Return how many tokens this rank sent to each expert, int64 [layers with experts, experts].

        None where this stage has no experts. With expert parallelism each token is counted by one rank;
        without it, by every rank of the tensor-parallel group.
        """
        loads = [dispatcher.loads for dispatcher in self._dispatchers()]
        return torch.stack(loads) if loads else None

    def reset_expert_loads(self) -> None:
        """Count anew from here on."""
        for dispatcher in self._dispatchers():
            dispatcher.reset_loads()

    def _dispatchers(self) -> list[ExpertDispatcher]:
        mlps = [layer.mlp for layer in self._order]
        return [mlp.dispatcher for mlp in mlps if isinstance(mlp, SparseFeedForward)]

    def loaders(self) -> dict[str, Loader]:
        """Return, by name in a Llama checkpoint, where each tensor of this stage goes."""
        found: dict[str, Loader] = {}
        if self.embed is not None:
            found["model.embed_tokens.weight"] = self.embed.tokens.load_weight
            if self.embed.positions is not None:
                found["model.position_embeddings.weight"] = self.embed.positions.load_weight
        if self.norm is not None:
            found |= norm_loaders(self.norm, "model.norm")
        if self.head is not None and not self.head.tied:
            tied = self.spec.tie_embeddings  # to the embedding of another stage
            found["model.embed_tokens.weight" if tied else "lm_head.weight"] = self.head.load_weight
        for index, layer in zip(self.held, self._order, strict=True):
            found |= {f"model.layers.{index}.{name}": to for name, to in layer.loaders().items()}
        return found

    def is_elsewhere(self, name: str) -> bool:
        """Whether the tensor `name` of a Llama checkpoint belongs to a stage other than this."""
        if found := re.match(r"model\.layers\.(\d+)\.", name):
            return int(found[1]) not in self.held and int(found[1]) < self.spec.num_layers
        ends = {"model.embed_tokens.": self.first, "model.position_embeddings.": self.first}
        ends |= {"model.norm.": self.last, "lm_head.": self.last}
        return any(name.startswith(end) and not here for end, here in ends.items())
