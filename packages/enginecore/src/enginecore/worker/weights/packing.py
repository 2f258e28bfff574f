"""Lay weights out, once, as the matrix products of a CPU want them, or quantise them.

torch.nn.functional.linear reorders its weight in every call, or reads it as it lies, which costs up to half
of the time of a small batch. Products are pagedattn's; where its kernels cannot be compiled they are
oneDNN's, by the operators that torch.compile emits.
"""

from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from collectives import ParallelLinear, ParallelLMHead
from enginecore.errors import ConfigError
from enginecore.worker.models.attention import Attention
from enginecore.worker.models.decoder import Decoder
from enginecore.worker.models.embedding import Embedding
from enginecore.worker.models.experts import ExpertWeights, Router
from enginecore.worker.models.feed_forward import FeedForward
from pagedattn import PackedExperts, Quantization, backend_name, linear, pack_experts, pack_linear

QuantizedLayers = Mapping[ParallelLinear | ExpertWeights, Quantization]
"""Layers that are quantised, and how."""

_TYPICAL_TOKENS = 64
"""Rows that oneDNN's layout is chosen for; it serves any number."""

_CHECKED_ROWS = 1024
"""Rows of a weight that are looked at together, to keep copies small."""

_BYTES = {"int8": 1.0, "int8-dynamic": 1.0, "int4": 0.5 + 2 / 32}
"""Bytes of a quantised weight's element; those of int4 with the scale of each group of 32."""


class PackedLinear:
    """A weight in the layout of pagedattn's kernels, as a layer's `matmul`.

    Where 16 bits hold every value of the weight, as they do for a checkpoint of bfloat16 or float16, they are
    stored: products with float32 rows are those of float32, and half the memory is read.
    """

    def __init__(
        self, weight: Tensor, quantization: Quantization | None = None, stored: torch.dtype | None = None
    ) -> None:
        """Pack `weight` [out, in], whose values came from the type `stored` if that is known."""
        if quantization is None:
            self.weight = pack_linear(weight, _narrowest_dtype(weight, stored))
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

    def __init__(
        self, dtype: torch.dtype, device: torch.device, quantizations: QuantizedLayers | None
    ) -> None:
        """`quantizations` is what `quantized_layers` returns of the model, None if nothing is quantised."""
        self._quantizations = quantizations or {}
        self._device = device
        self._kind = PackedLinear if quantizations is not None else _kind(dtype, device)
        self._awaited: Counter[ParallelLinear | ExpertWeights] = Counter()
        """Tensors that are still to be loaded."""
        self._stored: dict[ParallelLinear | ExpertWeights, torch.dtype] = {}
        """The type that the checkpoint has a layer's tensors in."""

    def expect(self, layers: Iterable[ParallelLinear | ExpertWeights]) -> None:
        """Take note of the layers that tensors will be loaded into, a layer once for each tensor.

        Linear ones that will be packed have no memory until then, so that one after another uses the same.
        """
        self._awaited.update(layers)
        for layer in self._awaited:
            if isinstance(layer, ExpertWeights) or self._kind is None:
                continue
            if layer.weight.numel() and not _is_tied(layer):
                layer.weight = nn.Parameter(layer.weight.to("meta"), requires_grad=False)

    @contextmanager
    def loading(self, layer: ParallelLinear | ExpertWeights | None, dtype: torch.dtype) -> Generator[None]:
        """Load one tensor of `dtype` into an expected layer; pack that after its last."""
        if layer is None:
            yield
            return
        if isinstance(layer, ParallelLinear) and layer.weight.is_meta:
            weight = torch.empty(layer.weight.shape, dtype=layer.weight.dtype, device=self._device)
            layer.weight = nn.Parameter(weight, requires_grad=False)
        yield
        self._stored[layer] = torch.promote_types(self._stored.get(layer, dtype), dtype)
        self._awaited[layer] -= 1
        if not self._awaited[layer]:
            self.pack(layer)

    def pack_embedding(self, embed: Embedding, head: ParallelLMHead | None) -> None:
        """Keep one copy of a loaded embedding: the packed weight of a head tied to it, if that will do."""
        if self._kind is not PackedLinear:
            return
        weight = embed.tokens.weight.detach()
        if head is not None and head.tied:
            packed = head.matmul
            head.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
            if isinstance(packed, PackedLinear) and packed.weight.quantization is None:
                embed.look_up_in(packed.weight)
                return
        embed.look_up_in(weight.to(_narrowest_dtype(weight, None)))

    def pack(self, layer: ParallelLinear | ExpertWeights) -> None:
        """Pack a layer whose weights are loaded, unless it is packed already."""
        if isinstance(layer, ExpertWeights):
            if layer.packed is None:
                stored = self._stored.get(layer)
                quantization = self._quantizations.get(layer)
                own = self._kind is PackedLinear
                if quantization is not None and layer.up.numel():
                    up, down = (
                        partial(pack_experts, quantization=q) for q in (quantization, _finer(quantization))
                    )
                else:
                    up = down = partial(_pack_experts, stored=stored) if own else pack_experts
                layer.pack(up, down)
            return
        weight = layer.weight
        if not weight.numel() or isinstance(layer.matmul, PackedLinear | OneDNNLinear):
            return
        if self._kind is OneDNNLinear:
            layer.matmul = OneDNNLinear(weight)
        elif self._kind is PackedLinear:
            layer.matmul = PackedLinear(weight, self._quantizations.get(layer), self._stored.get(layer))
        else:
            return
        if not _is_tied(layer):
            layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)


def check_quantization(model: Decoder, device: torch.device, quantization: Quantization | None) -> None:
    """Raise ConfigError where a model cannot be quantised so on a device."""
    if quantization is None:
        return
    if device.type != "cpu":
        raise ConfigError(f"quantization={quantization}: there are kernels for CPUs, not for {device.type}")


def packed_bytes(model: Decoder, quantization: Quantization | None) -> int:
    """Return the bytes of the weights and tables that this rank keeps once it has packed them."""
    if quantization is None:
        return model.num_bytes
    saved = 0.0
    for layer, own in quantized_layers(model, quantization).items():
        if isinstance(layer, ParallelLinear):
            saved += (0 if _is_tied(layer) else layer.weight.nbytes) - layer.weight.numel() * _BYTES[own]
        else:
            for weight, its in ((layer.up, own), (layer.down, _finer(own))):
                saved += weight.nbytes - weight.numel() * _BYTES[its]
    return int(model.num_bytes - saved)


def quantized_layers(model: Decoder, quantization: Quantization) -> QuantizedLayers:
    """Return the layers of a model that are quantised, and how.

    The router of a mixture stays as it is: it is small, and one wrong choice changes a token's experts. Of
    int4, some have int8: the head, where what is lost shows at once, and the projections to queries, keys and
    values and from the inner features of a network, which lose most (docs/performance.md has the figures).
    """
    found: dict[ParallelLinear | ExpertWeights, Quantization] = {}
    routers = {module.gate for module in model.modules() if isinstance(module, Router)}
    fine: set[ParallelLinear] = {module.qkv for module in model.modules() if isinstance(module, Attention)}
    fine |= {module.down for module in model.modules() if isinstance(module, FeedForward)}
    for layer in model.modules():
        if isinstance(layer, ParallelLinear | ExpertWeights) and layer not in routers:
            is_fine = layer in fine or isinstance(layer, ParallelLMHead)
            found[layer] = _finer(quantization) if is_fine else quantization
    return found


def _finer(quantization: Quantization) -> Quantization:
    """Return how a weight is quantised that int4 would spoil."""
    return "int8" if quantization == "int4" else quantization


def _is_tied(layer: ParallelLinear) -> bool:
    return isinstance(layer, ParallelLMHead) and layer.tied


def _kind(dtype: torch.dtype, device: torch.device) -> type[PackedLinear | OneDNNLinear] | None:
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    if backend_name(device) == "cpu":
        return PackedLinear
    operators = {"mkldnn::_reorder_linear_weight", "mkldnn::_linear_pointwise"}
    known = operators <= set(torch._C._dispatch_get_all_op_names())
    packs = known and torch.backends.mkldnn.is_available() and dtype != torch.float16
    return OneDNNLinear if packs else None


def _pack_experts(weight: Tensor, stored: torch.dtype | None) -> PackedExperts:
    """Pack weights [experts, out, in] as `PackedLinear` does one."""
    return pack_experts(weight, _narrowest_dtype(weight.flatten(0, 1), stored))


def _narrowest_dtype(weight: Tensor, stored: torch.dtype | None) -> torch.dtype:
    """Return a dtype of 16 bits that holds every value of `weight`, or else the weight's own."""
    if weight.dtype.itemsize == 2:
        return weight.dtype
    if stored in (torch.bfloat16, torch.float16):
        return stored
    # The first row tells most that are not.
    parts = [weight[:1], *weight.split(_CHECKED_ROWS)]
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(part.to(dtype).to(part.dtype), part) for part in parts):
            return dtype
    return weight.dtype
