"""Write a checkpoint of Llama's or Qwen3's architecture as a GGUF file."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any


def write_gguf(checkpoint: Path, path: Path, dtype: str) -> None:
    """Matrices are stored in `dtype` (bf16, f16 or f32), vectors in float32."""
    from safetensors import safe_open

    gguf = import_module("gguf")
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(path, config["model_type"])
    _add_hyperparameters(writer, config)
    _add_tokenizer(writer, json.loads((checkpoint / "tokenizer.json").read_text()), gguf)
    kind = {"bf16": "MOSTLY_BF16", "f16": "MOSTLY_F16", "f32": "ALL_F32"}[dtype]
    writer.add_file_type(gguf.LlamaFileType[kind])
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == config["model_type"])
    names: Any = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    with safe_open(checkpoint / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - it is no mapping
            weight = _rotary_order(name, weights.get_tensor(name), config)
            _add_tensor(writer, names.get_name(name, try_suffixes=(".weight",)), weight, dtype, gguf)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_hyperparameters(writer: Any, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any], gguf: Any) -> None:
    texts = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types(
        [
            gguf.TokenType.CONTROL if number in special else gguf.TokenType.NORMAL
            for number in range(len(texts))
        ]
    )
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)


def _rotary_order(name: str, weight: Any, config: dict[str, Any]) -> Any:
    """Reorder rows of Llama's q and k: its GGUF rotates pairs of neighbours, checkpoints halves of a head."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    part = name.split(".")[-2]
    if config["model_type"] != "llama" or part not in heads:
        return weight
    return weight.unflatten(0, (heads[part], 2, -1)).transpose(1, 2).reshape(weight.shape)


def _add_tensor(writer: Any, name: str, weight: Any, dtype: str, gguf: Any) -> None:
    import torch

    if weight.dim() == 1 or dtype == "f32":
        writer.add_tensor(name, weight.float().numpy())
    elif dtype == "f16":
        writer.add_tensor(name, weight.half().numpy())
    else:
        # numpy has no bfloat16: bytes, of which the writer is told the type.
        content = weight.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, content, raw_dtype=gguf.GGMLQuantizationType.BF16)
