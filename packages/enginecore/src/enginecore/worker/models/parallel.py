"""Parallelism of a model: its tensor- and expert-parallel ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from collectives import Communicator, ExpertPlacement, load_placements
from enginecore.errors import ConfigError
from enginecore.worker.models.spec import DecoderSpec
from pagedattn import host_call


@dataclass(frozen=True)
class ModelParallel:
    """The groups that this rank shares its layers with.

    Without `ep` every rank of `tp` holds a slice of every expert. With it, experts are whole, and
    `placements` say which ranks of `ep` hold which: one placement for all layers with experts, or one for
    each of the model, in order. `ep` then covers all ranks of `tp`, and those of other replicas of the dense
    layers (data parallelism), which must all run their steps together.
    """

    tp: Communicator
    ep: Communicator | None = None
    placements: tuple[ExpertPlacement, ...] = ()

    def __post_init__(self) -> None:
        if (self.ep is None) != (not self.placements):
            raise ValueError("expert parallelism needs both a communicator and a placement of experts")

    def placement(self, spec: DecoderSpec, layer: int) -> ExpertPlacement:
        """Return where the experts of a layer of the model are; on this rank if there is no `ep`."""
        assert spec.experts is not None
        if self.ep is None:
            return ExpertPlacement.even(spec.experts.count, 1)
        if len(self.placements) == 1:
            return self.placements[0]
        return self.placements[sorted(spec.experts.layers).index(layer)]


def all_reduce_of(comm: Communicator) -> Callable[[Tensor], object]:
    """Return `comm.all_reduce` as an operation that a program of the layers may have."""
    return comm.all_reduce if comm.size == 1 else partial(host_call, comm.all_reduce)


def expert_placements(spec: DecoderSpec, ranks: int, file: str | None) -> tuple[ExpertPlacement, ...]:
    """Return the placement of the experts on `ranks` that `file` holds, or an even one if that is None.

    Raises:
        ConfigError: the model has no experts; the file cannot be read, or is for other experts, ranks or
            layers than these.
    """
    experts = spec.experts
    if experts is None:
        raise ConfigError("enable_expert_parallel: the model has no experts")
    if file is None:
        return (ExpertPlacement.even(experts.count, ranks),)
    try:
        placements = load_placements(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"expert_placement: {error}") from error
    found = (placements[0].num_experts, len(placements[0].ranks))
    if found != (experts.count, ranks):
        raise ConfigError(
            f"expert_placement={file} is for {found[0]} experts on {found[1]} ranks, "
            f"and here are {experts.count} experts on {ranks} ranks"
        )
    if len(placements) not in (1, len(experts.layers)):
        raise ConfigError(
            f"expert_placement={file} has {len(placements)} layers, and the model {len(experts.layers)} "
            "with experts: give as many, or one for all"
        )
    return placements
