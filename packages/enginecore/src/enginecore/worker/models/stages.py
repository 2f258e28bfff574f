"""The split of a model's layers into pipeline stages."""

import torch

from collectives import LocalCommunicator
from enginecore.worker.models.layers import Layer
from enginecore.worker.models.parallel import ModelParallel
from enginecore.worker.models.spec import DecoderSpec


def split_layers(spec: DecoderSpec, stages: int) -> list[range]:
    """Return the layers of each stage, so that the stage with most parameters has as few as can be.

    The first stage has the embedding too, and the last the norm and the head; where these are tied, both
    have the table. Of splits that are equal in that, one is taken in which the rest are about equal too.

    Raises:
        ValueError: there are more stages than layers.
    """
    if stages > spec.num_layers:
        raise ValueError(f"{stages} stages need at least a layer each, and the model has {spec.num_layers}")
    if stages == 1:
        return [range(spec.num_layers)]
    ends = _cut(_weights(spec), stages)
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _weights(spec: DecoderSpec) -> list[int]:
    """Parameters of each layer, with those of the model's two ends on the first and the last."""
    alone = ModelParallel(LocalCommunicator())
    with torch.device("meta"):
        layers = [Layer(spec, index, alone) for index in range(spec.num_layers)]
    weights = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    table = spec.vocab_size * spec.hidden_size
    weights[0] += table + spec.learned_positions * spec.max_position * spec.hidden_size
    weights[-1] += table + spec.hidden_size
    return weights


def _cut(weights: list[int], stages: int) -> list[int]:
    """Return each stage's end: the least possible heaviest stage, and then the least sum of squares.

    After the stages looked at so far, `best[n]` is these two and the ends, for the best way to have the first
    n layers in them.
    """
    before = [0]
    for weight in weights:
        before.append(before[-1] + weight)
    best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [])}
    for _ in range(stages):
        best = {
            end: min(
                (max(heaviest, weight := before[end] - before[start]), squares + weight**2, [*ends, end])
                for start, (heaviest, squares, ends) in best.items()
                if start < end
            )
            for end in range(min(best) + 1, len(before))
        }
    return best[len(weights)][2]
