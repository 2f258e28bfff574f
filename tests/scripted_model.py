"""A checkpoint that says a script, whatever the prompt says: the prompt's length chooses the script.

A GPT-2 whose positions are the identity and whose layers add nothing, so that the position alone decides the
next token. Ids are byte values, and special tokens of a test's own come after those of the byte tokenizer.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import byte_tokenizer
from byte_tokenizer import EOS, ROLES

VOCAB = 320
POSITIONS = 1024
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


class Script:
    """The positions of one script, and a prompt that is followed by it."""

    def __init__(self, start: int, tokens: Sequence[int]) -> None:
        self.start = start
        self.tokens = tokens

    @property
    def prompt(self) -> str:
        return "q" * self.start


def write(path: Path, texts: Sequence[str], special: Sequence[str] = ()) -> list[Script]:
    """Write model and tokenizer to the folder `path`; return the script of each text, which ends in EOS.

    `special` are special tokens, which come out as one token where a text holds them.
    """
    path.mkdir(parents=True)
    backend = byte_tokenizer.backend()
    backend.add_special_tokens(list(special))
    backend.save(str(path / "tokenizer.json"))
    settings = {**ROLES, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    scripts, start = [], 1
    for text in texts:
        script = Script(start, [*backend.encode(text).ids, EOS])
        start += len(script.tokens)
        scripts.append(script)
    assert start <= POSITIONS
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": POSITIONS,
        "n_inner": 8,
        "n_layer": 1,
        "n_head": 16,
        "n_positions": POSITIONS,
        "activation_function": "gelu_new",
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
        "dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    save_file(_weights(scripts), path / "model.safetensors", metadata={"format": "pt"})
    return scripts


def _weights(scripts: Sequence[Script]) -> dict[str, np.ndarray]:
    def zeros(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    size = POSITIONS
    head = zeros(VOCAB, size)
    for script in scripts:
        for place, token in enumerate(script.tokens, script.start - 1):
            head[token, place] = 1.0
    layer = "transformer.h.0."
    return {
        "transformer.wte.weight": zeros(VOCAB, size),
        "transformer.wpe.weight": np.eye(size, dtype=np.float32),
        f"{layer}ln_1.weight": np.ones(size, np.float32),
        f"{layer}ln_1.bias": zeros(size),
        f"{layer}attn.c_attn.weight": zeros(size, 3 * size),
        f"{layer}attn.c_attn.bias": zeros(3 * size),
        f"{layer}attn.c_proj.weight": zeros(size, size),
        f"{layer}attn.c_proj.bias": zeros(size),
        f"{layer}ln_2.weight": np.ones(size, np.float32),
        f"{layer}ln_2.bias": zeros(size),
        f"{layer}mlp.c_fc.weight": zeros(size, 8),
        f"{layer}mlp.c_fc.bias": zeros(8),
        f"{layer}mlp.c_proj.weight": zeros(8, size),
        f"{layer}mlp.c_proj.bias": zeros(size),
        "transformer.ln_f.weight": np.ones(size, np.float32),
        "transformer.ln_f.bias": zeros(size),
        "lm_head.weight": head,
    }
