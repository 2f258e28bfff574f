"""Lay weights out, once, as oneDNN's matrix product on a CPU wants them.

torch.nn.functional.linear reorders its weight in every call, or reads it as it lies, which costs up to half
of the time of a small batch. The operators used are those that torch.compile emits.
"""

import torch
from torch import Tensor, nn

from collectives import ParallelLinear, ParallelLMHead

_TYPICAL_TOKENS = 64
"""Rows that the layout is chosen for; it serves any number."""


class PackedLinear:
    """A weight in oneDNN's own layout, as a layer's `matmul`."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_TOKENS)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x [..., in] times the packed weight, plus bias; `weight` is not looked at."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch packs weights of `dtype` for `device`."""
    operators = torch._C._dispatch_get_all_op_names()
    return (
        device.type == "cpu"
        and dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and {"mkldnn::_reorder_linear_weight", "mkldnn::_linear_pointwise"} <= set(operators)
    )


def pack_linear_layers(model: nn.Module) -> None:
    """Pack the weight of every linear layer in place; the plain one is kept only where others use it too.

    Layers of which this rank holds nothing stay as they are, and so do experts, whose rows are multiplied in
    groups.
    """
    for layer in model.modules():
        if isinstance(layer, ParallelLinear) and layer.weight.numel():
            layer.matmul = PackedLinear(layer.weight)
            if not (isinstance(layer, ParallelLMHead) and layer.tied):
                layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)
