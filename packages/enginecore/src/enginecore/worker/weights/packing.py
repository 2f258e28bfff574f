"""Lay weights out, once, as the matrix products of a CPU want them, or quantise them.

torch.nn.functional.linear reorders its weight in every call, or reads it as it lies, which costs up to half
of the time of a small batch. Products are pagedattn's; where its kernels cannot be compiled they are
oneDNN's, by the operators that torch.compile emits.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from collectives import Matmul, ParallelLinear, ParallelLMHead
from enginecore.errors import ConfigError
from enginecore.worker.models.decoder import Decoder
from enginecore.worker.models.experts import ExpertWeights, SparseFeedForward
from pagedattn import PackedExperts, Quantization, backend_name, linear, pack_experts, pack_linear

_TYPICAL_TOKENS = 64
"""Rows that oneDNN's layout is chosen for; it serves any number."""

_CHECKED_ROWS = 1024
"""Rows of a weight that are looked at together, to keep copies small."""

_BYTES = {"int8": 1.0, "int8-dynamic": 1.0, "int4": 0.5 + 2 / 64}
"""Bytes of a quantised weight's element; those of int4 with the scale of each group of 64."""


class PackedLinear:
    """A weight in the layout of pagedattn's kernels, as a layer's `matmul`.

    Where 16 bits hold every value of the weight, as they do for a checkpoint of bfloat16 or float16, they are
    stored: products with float32 rows are those of float32, and half the memory is read.
    """

    def __init__(self, weight: Tensor, quantization: Quantization | None = None) -> None:
        if quantization is None:
            self.weight = pack_linear(weight, _narrowest_dtype(weight))
        else:
            self.weight = pack_linear(weight, quantization=quantization)

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


class Packer:
    """Packs the weights of linear layers in place; the plain one is kept only where others use it too.

    Layers of which this rank holds nothing stay as they are, and so do layers of a dtype or on a device that
    nothing here packs for.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, quantization: Quantization | None) -> None:
        self._quantization = quantization
        self._make = _maker(dtype, device)

    def pack(self, layer: ParallelLinear | ExpertWeights) -> None:
        """Pack a layer whose weights are loaded, unless it is packed already."""
        if isinstance(layer, ExpertWeights):
            if layer.packed is None:
                layer.pack(_pack_experts if self._make is PackedLinear else pack_experts)
            return
        if not layer.weight.numel() or isinstance(layer.matmul, PackedLinear | OneDNNLinear):
            return
        if self._quantization is not None:
            layer.matmul = PackedLinear(layer.weight, _of_layer(self._quantization, layer))
        elif self._make is not None:
            layer.matmul = self._make(layer.weight)
        else:
            return
        if not (isinstance(layer, ParallelLMHead) and layer.tied):
            layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)


def check_quantization(model: Decoder, device: torch.device, quantization: Quantization | None) -> None:
    """Raise ConfigError where a model cannot be quantised so on a device."""
    if quantization is None:
        return
    if device.type != "cpu":
        raise ConfigError(f"quantization={quantization}: there are kernels for CPUs, not for {device.type}")
    if any(isinstance(module, SparseFeedForward) for module in model.modules()):
        raise ConfigError(f"quantization={quantization}: the model has experts, which cannot be quantised")


def packed_bytes(model: Decoder, quantization: Quantization | None) -> int:
    """Return the bytes of the weights and tables that this rank keeps once it has packed them."""
    if quantization is None:
        return model.num_bytes
    saved = 0.0
    for layer in model.modules():
        if isinstance(layer, ParallelLinear):
            packed = layer.weight.numel() * _BYTES[_of_layer(quantization, layer)]
            kept = isinstance(layer, ParallelLMHead) and layer.tied
            saved += (0 if kept else layer.weight.nbytes) - packed
    return int(model.num_bytes - saved)


def _of_layer(quantization: Quantization, layer: ParallelLinear) -> Quantization:
    """Return how a layer is quantised: the head at most to int8, since what is lost there shows at once."""
    return "int8" if quantization == "int4" and isinstance(layer, ParallelLMHead) else quantization


def _maker(dtype: torch.dtype, device: torch.device) -> Callable[[Tensor], Matmul] | None:
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    if backend_name(device) == "cpu":
        return PackedLinear
    operators = {"mkldnn::_reorder_linear_weight", "mkldnn::_linear_pointwise"}
    known = operators <= set(torch._C._dispatch_get_all_op_names())
    packs = known and torch.backends.mkldnn.is_available() and dtype != torch.float16
    return OneDNNLinear if packs else None


def _pack_experts(weight: Tensor) -> PackedExperts:
    """Pack weights [experts, out, in] as `PackedLinear` does one."""
    return pack_experts(weight, _narrowest_dtype(weight.flatten(0, 1)))


def _narrowest_dtype(weight: Tensor) -> torch.dtype:
    """Return a dtype of 16 bits that holds every value of `weight`, or else the weight's own."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(part.to(dtype).to(part.dtype), part) for part in weight.split(_CHECKED_ROWS)):
            return dtype
    return weight.dtype
