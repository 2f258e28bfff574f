"""Lay weights out, once, as the matrix products of a CPU want them.

torch.nn.functional.linear reorders its weight in every call, or reads it as it lies, which costs up to half
of the time of a small batch. Products are pagedattn's; where its kernels cannot be compiled they are
oneDNN's, by the operators that torch.compile emits.
"""

from functools import cache

import torch
from torch import Tensor, nn

from collectives import ParallelLinear, ParallelLMHead
from pagedattn import backend_name, linear, pack_linear

_TYPICAL_TOKENS = 64
"""Rows that oneDNN's layout is chosen for; it serves any number."""

_CHECKED_ROWS = 1024
"""Rows of a weight that are looked at together, to keep copies small."""


class PackedLinear:
    """A weight in the layout of pagedattn's kernels, as a layer's `matmul`.

    Where 16 bits hold every value of the weight, as they do for a checkpoint of bfloat16 or float16, they are
    stored: products with float32 rows are those of float32, and half the memory is read.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = pack_linear(weight, _narrowest_dtype(weight))

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x [..., in] times the packed weight, plus bias; `weight` is not looked at."""
        return linear(x, self.weight, bias)


class OneDNNLinear:
    """A weight in oneDNN's own layout, as a layer's `matmul`."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_TOKENS)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x [..., in] times the packed weight, plus bias; `weight` is not looked at."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")


def pack_linear_layers(model: nn.Module) -> None:
    """Pack the weight of every linear layer in place; the plain one is kept only where others use it too.

    Layers of which this rank holds nothing stay as they are, and so do experts, whose rows are multiplied in
    groups, and layers of a dtype or on a device that nothing here packs for.
    """
    for layer in model.modules():
        if isinstance(layer, ParallelLinear) and layer.weight.numel():
            packer = _packer(layer.weight.dtype, layer.weight.device)
            if packer is None:
                continue
            layer.matmul = packer(layer.weight)
            if not (isinstance(layer, ParallelLMHead) and layer.tied):
                layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)


@cache
def _packer(dtype: torch.dtype, device: torch.device) -> type[PackedLinear] | type[OneDNNLinear] | None:
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    if backend_name(device) == "cpu":
        return PackedLinear
    operators = {"mkldnn::_reorder_linear_weight", "mkldnn::_linear_pointwise"}
    known = operators <= set(torch._C._dispatch_get_all_op_names())
    packs = known and torch.backends.mkldnn.is_available() and dtype != torch.float16
    return OneDNNLinear if packs else None


def _narrowest_dtype(weight: Tensor) -> torch.dtype:
    """Return a dtype of 16 bits that holds every value of `weight`, or else the weight's own."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(part.to(dtype).to(part.dtype), part) for part in weight.split(_CHECKED_ROWS)):
            return dtype
    return weight.dtype
