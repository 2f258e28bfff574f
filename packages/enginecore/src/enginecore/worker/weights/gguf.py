"""The tensors of a GGUF file, dequantised, under the names of Hugging Face's checkpoints."""

import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from enginecore.errors import ModelError
from enginecore.gguf import ROPE_FACTORS, Contents, read

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_BLOCKS_A_ROW = 64


def weights(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (Hugging Face name, float32 array) for every tensor, dequantised."""
    from gguf import GGML_QUANT_SIZES, dequantize

    file = read(path)
    for name, tensor in file.tensors.items():
        if name == ROPE_FACTORS:
            continue
        shape = tuple(int(size) for size in reversed(tensor.shape))
        data = tensor.data
        block, size = GGML_QUANT_SIZES[tensor.tensor_type]
        if block > 1:
            # The library takes sixteen rows at a time, and is faster with long ones than with the tensor's.
            data = data.reshape(-1, size * math.gcd(data.size // size, _BLOCKS_A_ROW))
        values = dequantize(data, tensor.tensor_type).astype(np.float32, copy=False).reshape(shape)
        # What needed no dequantising still lies in the read-only file.
        values = np.require(values, requirements="W")
        yield _hf_name(name, path), _unpermute(file, name, values)


def _hf_name(name: str, path: Path) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if found is None or found[2] not in _LAYER_NAMES:
        raise ModelError(f"{path}: tensor {name} is of no known kind")
    return f"model.layers.{found[1]}.{_LAYER_NAMES[found[2]]}.{found[3]}"


def _unpermute(file: Contents, name: str, values: np.ndarray) -> np.ndarray:
    """Undo the reordering of Q and K rows that llama.cpp's converter makes for architecture "llama".

    There, the two halves that rotary embedding pairs up lie interleaved within each head.
    """
    if file.metadata["general.architecture"] != "llama":
        return values
    heads_key = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
    kind = name.split(".")[2] if name.startswith("blk.") else ""
    if kind not in heads_key:
        return values
    heads = file.get(heads_key[kind], file.get("attention.head_count"))
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
