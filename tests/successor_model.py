"""A checkpoint whose greedy answer is known: each token has one successor, whatever came before it.

A Llama whose embedding is the identity and whose layers add nothing, so that the last token alone decides.
Ids are byte values, so that every character beyond ASCII is split over several tokens.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import byte_tokenizer
from byte_tokenizer import BOS, EOS

VOCAB = 320

CHAINS = (b"abcSTOPzz", "q\N{HOT PEPPER}é语".encode(), b"e", b"u\xffv")
"""What follows each first byte. A chain ends in EOS, but for the first, which goes on with z."""


def write(path: Path) -> Path:
    """Write model and tokenizer to the folder `path`."""
    path.mkdir(parents=True)
    byte_tokenizer.save(path, chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": VOCAB,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    save_file(_weights(), path / "model.safetensors", metadata={"format": "pt"})
    return path


def _weights() -> dict[str, np.ndarray]:
    def zeros(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    layer = "model.layers.0."
    head = zeros(VOCAB, VOCAB)
    for token, following in enumerate(_successors()):
        head[following, token] = 1.0
    return {
        "model.embed_tokens.weight": np.eye(VOCAB, dtype=np.float32),
        **{f"{layer}self_attn.{name}_proj.weight": zeros(VOCAB, VOCAB) for name in "qkvo"},
        f"{layer}mlp.gate_proj.weight": zeros(32, VOCAB),
        f"{layer}mlp.up_proj.weight": zeros(32, VOCAB),
        f"{layer}mlp.down_proj.weight": zeros(VOCAB, 32),
        f"{layer}input_layernorm.weight": np.ones(VOCAB, np.float32),
        f"{layer}post_attention_layernorm.weight": np.ones(VOCAB, np.float32),
        "model.norm.weight": np.ones(VOCAB, np.float32),
        "lm_head.weight": head,
    }


def _successors() -> list[int]:
    following = [ord("z")] * VOCAB
    for chain in CHAINS:
        for token, after in zip(chain, [*chain[1:], EOS], strict=True):
            following[token] = after
    following[ord("z")] = ord("z")
    return following
