"""From the tensors of a checkpoint to those that the decoder asks for, which bear the names of Llama's files.

Fused tensors are taken apart, transposed ones turned; what comes out shares memory with what went in.
"""

import re
from collections.abc import Sequence

from torch import Tensor

from enginecore.worker.models.spec import DecoderSpec, ExpertSpec

Named = tuple[str, Tensor]

_GPT2_GLOBALS = {
    "wte.weight": "model.embed_tokens.weight",
    "wpe.weight": "model.position_embeddings.weight",
    "ln_f.weight": "model.norm.weight",
    "ln_f.bias": "model.norm.bias",
}
_GPT2_NORMS = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}
_GPT2_PRODUCTS = {
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("gate_proj", "up_proj")
_MIXTRAL_EXPERTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def canonical(spec: DecoderSpec, name: str, tensor: Tensor) -> list[Named]:
    """Return what tensor `name` of a checkpoint holds, by the names of the decoder's loaders.

    Names that are not known come back as they are.

    Raises:
        ValueError: a fused tensor does not have the shape of its parts.
    """
    if spec.names == "gpt2":
        return _gpt2(spec, name, tensor)
    found = re.fullmatch(r"(model\.layers\.\d+\.)(.+)", name)
    if found is None:
        return [(name, tensor)]
    return [(found[1] + inner, part) for inner, part in _in_layer(spec, found[2], tensor)]


def _in_layer(spec: DecoderSpec, name: str, tensor: Tensor) -> list[Named]:
    name = name.replace("block_sparse_moe.", "mlp.")
    stem, _, kind = name.rpartition(".")
    if stem == "self_attn.qkv_proj":  # Phi-3
        return _cut(_QKV, kind, tensor, _qkv_sizes(spec))
    if stem == "mlp.gate_up_proj":  # Phi-3
        parts = [f"mlp.{part}" for part in _GATE_UP]
        return _cut(parts, kind, tensor, [spec.intermediate_size] * 2)
    if found := re.fullmatch(r"(mlp\.experts\.\d+)\.(w[123])\.weight", name):  # Mixtral
        return [(f"{found[1]}.{_MIXTRAL_EXPERTS[found[2]]}.weight", tensor)]
    if name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj") and spec.experts is not None:
        return _fused_experts(spec.experts, spec.hidden_size, kind, tensor)
    return [(name, tensor)]


def _fused_experts(experts: ExpertSpec, hidden: int, kind: str, tensor: Tensor) -> list[Named]:
    """Take apart the experts of a layer as transformers 5 has them in memory."""
    gate_up = kind == "gate_up_proj"
    inner = experts.intermediate_size
    shape = [experts.count, *((2 * inner, hidden) if gate_up else (hidden, inner))]
    if list(tensor.shape) != shape:
        raise ValueError(f"expected shape {shape}, got {list(tensor.shape)}")
    found: list[Named] = []
    for expert, matrix in enumerate(tensor.unbind(0)):
        stem = f"mlp.experts.{expert}"
        if gate_up:
            found += _cut([f"{stem}.{part}" for part in _GATE_UP], "weight", matrix, [inner, inner])
        else:
            found.append((f"{stem}.down_proj.weight", matrix))
    return found


def _gpt2(spec: DecoderSpec, name: str, tensor: Tensor) -> list[Named]:
    """GPT-2: with and without the prefix of the model with a head, products stored [in, out]."""
    plain = name.removeprefix("transformer.")
    if plain in _GPT2_GLOBALS:
        return [(_GPT2_GLOBALS[plain], tensor)]
    found = re.fullmatch(r"h\.(\d+)\.(.+)\.(weight|bias)", plain)
    if found is None:
        return [(name, tensor)]
    prefix, stem, kind = f"model.layers.{found[1]}.", found[2], found[3]
    if stem in _GPT2_NORMS:
        return [(f"{prefix}{_GPT2_NORMS[stem]}.{kind}", tensor)]
    if tensor.ndim == 2:
        tensor = tensor.t()
    if stem in _GPT2_PRODUCTS:
        return [(f"{prefix}{_GPT2_PRODUCTS[stem]}.{kind}", tensor)]
    if stem == "attn.c_attn":
        return [(prefix + inner, part) for inner, part in _cut(_QKV, kind, tensor, _qkv_sizes(spec))]
    return [(name, tensor)]


def _qkv_sizes(spec: DecoderSpec) -> list[int]:
    return [count * spec.head_dim for count in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]


def _cut(names: Sequence[str], kind: str, tensor: Tensor, sizes: Sequence[int]) -> list[Named]:
    """Cut a fused tensor along its first dimension."""
    if not tensor.ndim or tensor.shape[0] != sum(sizes):
        parts = " + ".join(map(str, sizes))
        raise ValueError(f"expected {parts} = {sum(sizes)} output features, got shape {list(tensor.shape)}")
    return [(f"{name}.{kind}", part) for name, part in zip(names, tensor.split(list(sizes)), strict=True)]
