"""How a model is spread over ranks."""

from dataclasses import dataclass

from collectives import Communicator, ExpertPlacement


@dataclass(frozen=True)
class ModelParallel:
    """The groups that this rank shares its layers with.

    Without `ep` every rank of `tp` holds a slice of every expert. With it, experts are whole, and `placement`
    says which ranks of `ep` hold which; `ep` then covers all ranks of `tp`, and those of other replicas of
    the dense layers (data parallelism), which must all run their steps together.
    """

    tp: Communicator
    ep: Communicator | None = None
    placement: ExpertPlacement | None = None

    def __post_init__(self) -> None:
        if (self.ep is None) != (self.placement is None):
            raise ValueError("expert parallelism needs both a communicator and a placement of experts")
