"""From the tensors of a checkpoint to those that the decoder asks for, which bear the names of Llama's files.

A family's table (`TensorNames`) says what its modules are called. Fused tensors are taken apart, transposed
ones turned; what comes out shares memory with what went in.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from enginecore.worker.models.spec import DecoderSpec, ExpertSpec

Named = tuple[str, Tensor]

_GATE_UP = ("gate_proj", "up_proj")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_FUSED_EXPERTS = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)")


def canonical(spec: DecoderSpec, name: str, tensor: Tensor) -> list[Named]:
    """Return what tensor `name` of a checkpoint holds, by the names of the decoder's loaders.

    Names that are not known come back as they are.

    Raises:
        ValueError: a fused tensor does not have the shape of its parts.
    """
    found = _FUSED_EXPERTS.fullmatch(name)
    if found is not None and spec.experts is not None:
        return _fused_experts(spec.experts, spec.hidden_size, found[1], found[2], tensor)
    module, _, kind = name.removeprefix(spec.names.prefix).rpartition(".")
    pattern, numbers = _pattern(module)
    ours = spec.names.modules.get(pattern)
    if ours is None:
        return [(name, tensor)]
    if pattern in spec.names.transposed and tensor.ndim == 2:
        tensor = tensor.t()
    if isinstance(ours, str):
        return [(f"{ours.format(**numbers)}.{kind}", tensor)]
    parts = [part.format(**numbers) for part in ours]
    return _cut(parts, kind, tensor, [_features(spec, part) for part in parts])


@lru_cache(maxsize=65536)
def _pattern(module: str) -> tuple[str, dict[str, str]]:
    """Return a module's name with placeholders for its numbers, and the numbers by placeholder."""
    keys = ("layer", "expert")
    numbers = dict(zip(keys, _NUMBER.findall(f"{module}."), strict=False))
    places = iter(keys)
    return _NUMBER.sub(lambda _: f"{{{next(places, 'other')}}}", f"{module}.").removesuffix("."), numbers


def _features(spec: DecoderSpec, module: str) -> int:
    """Return the output features of one of the modules that families fuse, by its Llama name."""
    sizes = {
        "q_proj": spec.num_heads * spec.head_dim,
        "k_proj": spec.num_kv_heads * spec.head_dim,
        "v_proj": spec.num_kv_heads * spec.head_dim,
        "gate_proj": spec.intermediate_size,
        "up_proj": spec.intermediate_size,
    }
    return sizes[module.rpartition(".")[2]]


def _fused_experts(experts: ExpertSpec, hidden: int, stem: str, kind: str, tensor: Tensor) -> list[Named]:
    """Take apart the experts of a layer as transformers 5 has them in memory."""
    gate_up = kind == "gate_up_proj"
    inner = experts.intermediate_size
    shape = [experts.count, *((2 * inner, hidden) if gate_up else (hidden, inner))]
    if list(tensor.shape) != shape:
        raise ValueError(f"expected shape {shape}, got {list(tensor.shape)}")
    found: list[Named] = []
    for expert, matrix in enumerate(tensor.unbind(0)):
        if gate_up:
            parts = [f"{stem}.{expert}.{part}" for part in _GATE_UP]
            found += _cut(parts, "weight", matrix, [inner, inner])
        else:
            found.append((f"{stem}.{expert}.down_proj.weight", matrix))
    return found


def _cut(names: Sequence[str], kind: str, tensor: Tensor, sizes: Sequence[int]) -> list[Named]:
    """Cut a fused tensor along its first dimension."""
    if not tensor.ndim or tensor.shape[0] != sum(sizes):
        parts = " + ".join(map(str, sizes))
        raise ValueError(f"expected {parts} = {sum(sizes)} output features, got shape {list(tensor.shape)}")
    return [(f"{name}.{kind}", part) for name, part in zip(names, tensor.split(list(sizes)), strict=True)]
