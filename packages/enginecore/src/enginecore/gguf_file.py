"""Read GGUF files (format: ggml's docs/gguf.md) as if they were Hugging Face checkpoints. No torch."""

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from enginecore.errors import ModelError
from enginecore.gguf_reader import StoredTensor, read_header

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

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

_ROPE_FACTORS = "rope_freqs.weight"


class Contents(NamedTuple):
    """An opened file: its metadata as Python values, and its tensors where they lie."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]

    def get(self, key: str, default: Any = None) -> Any:
        """Return metadata `key`, written without the architecture's prefix where it has one."""
        architecture = self.metadata.get("general.architecture")
        return self.metadata.get(f"{architecture}.{key}", self.metadata.get(key, default))


@lru_cache(maxsize=4)
def read(path: Path) -> Contents:
    """Open a GGUF file; tensors stay on disk until used.

    Raises:
        ModelError: it is not a GGUF file, or is cut short.
    """
    return Contents(*read_header(path))


def hf_config(path: Path) -> dict[str, Any]:
    """Return the model's configuration with config.json's keys.

    Raises:
        ModelError: the architecture is not one of those read here, or a size is missing.
    """
    file = read(path)
    name = file.get("general.architecture")
    if name not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise ModelError(f"{path}: GGUF architecture {name!r} is not supported (supported: {known})")
    heads = _required(file, path, "attention.head_count")
    hidden_size = _required(file, path, "embedding_length")
    head_dim = file.get("attention.key_length") or hidden_size // heads
    return {
        "architectures": [_ARCHITECTURES[name]],
        "model_type": name,
        "vocab_size": len(file.metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden_size,
        "intermediate_size": _required(file, path, "feed_forward_length"),
        "num_hidden_layers": _required(file, path, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": round(_required(file, path, "attention.layer_norm_rms_epsilon"), 12),
        "max_position_embeddings": _required(file, path, "context_length"),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope_parameters(file, path),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }


def generation_config(path: Path) -> dict[str, Any]:
    """Return the end-of-turn ids, as generation_config.json would name them."""
    metadata = read(path).metadata
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    found = [metadata[key] for key in keys if metadata.get(key) is not None]
    return {"eos_token_id": list(dict.fromkeys(found))} if found else {}


def weights(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (Hugging Face name, float32 array) for every tensor, dequantised."""
    from gguf import dequantize

    file = read(path)
    for name, tensor in file.tensors.items():
        if name == _ROPE_FACTORS:
            continue
        shape = tuple(int(size) for size in reversed(tensor.shape))
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False).reshape(shape)
        # What needed no dequantising still lies in the read-only file.
        values = np.require(values, requirements="W")
        yield _hf_name(name, path), _unpermute(file, name, values)


def _required(file: Contents, path: Path, key: str) -> Any:
    value = file.get(key)
    if value is None:
        raise ModelError(f"{path}: metadata key {key} is missing")
    return value


def _rope_parameters(file: Contents, path: Path) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": file.get("rope.freq_base", 10000.0)}
    if _ROPE_FACTORS in file.tensors:
        factors = np.asarray(file.tensors[_ROPE_FACTORS].data, np.float32)
        parameters |= {"rope_type": "factors", "factors": factors.tolist()}
    kind = file.get("rope.scaling.type")
    if kind == "linear":
        parameters |= {"rope_type": "linear", "factor": file.get("rope.scaling.factor", 1.0)}
    elif kind == "yarn":
        parameters |= {
            "rope_type": "yarn",
            "factor": file.get("rope.scaling.factor", 1.0),
            "original_max_position_embeddings": file.get("rope.scaling.original_context_length"),
        }
    elif kind not in (None, "none"):
        raise ModelError(f"{path}: rope scaling {kind!r} is not supported (supported: linear, yarn)")
    return parameters


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
