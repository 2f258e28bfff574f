"""The dense feed-forward network of a layer."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from collectives import ColumnParallelLinear, Communicator, RowParallelLinear
from enginecore.errors import ModelError
from enginecore.worker.models.parallel import all_reduce_of
from enginecore.worker.models.spec import Activation, DecoderSpec
from pagedattn import activation as plain_activation
from pagedattn import gelu_and_mul, silu_and_mul

_GATED: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu_and_mul,
    "gelu": partial(gelu_and_mul, approximate="none"),
    "gelu_tanh": partial(gelu_and_mul, approximate="tanh"),
}


def activation(spec: DecoderSpec) -> Callable[[Tensor], Tensor]:
    """Return what stands between the projections; where it is gated, it halves the last dimension.

    Raises:
        ModelError: there is no such activation with a gate.
    """
    if not spec.gated:
        return partial(plain_activation, kind=spec.activation)
    if spec.activation not in _GATED:
        raise ModelError(f"activation {spec.activation!r} is not supported with a gate")
    return _GATED[spec.activation]


class FeedForward(nn.Module):
    """down(act(up(x))), or gated (Shazeer, GLU variants) down(act(gate(x)) * up(x))."""

    def __init__(self, spec: DecoderSpec, comm: Communicator) -> None:
        super().__init__()
        inner = spec.intermediate_size
        parts = [inner, inner] if spec.gated else [inner]
        self.up = ColumnParallelLinear(spec.hidden_size, parts, bias=spec.mlp_bias, comm=comm)
        """The gate's projection, if there is one, then that to be gated."""
        self.down = RowParallelLinear(
            inner, spec.hidden_size, bias=spec.mlp_bias, comm=comm, reduce=all_reduce_of(comm)
        )
        self.activation = activation(spec)

    @property
    def step_width(self) -> int:
        """Elements for each token of projections and activations together."""
        return sum(self.up.local_parts) + self.up.local_parts[0]

    def forward(self, x: Tensor) -> Tensor:
        """Return x [tokens, hidden] put through the network."""
        return self.down(self.activation(self.up(x)))
