"""Write models with random weights, in transformers' environment: `python -m compare.models FOLDER MODEL …`.

Safetensors in bfloat16, and GGUF files with matrices in bf16, f32 (the same values) and f16.
"""

import sys
from pathlib import Path
from typing import Any

from compare.gguf_file import write_gguf
from compare.tasks import checkpoint_folder, gguf_file

SPECIAL = ("<|begin|>", "<|end|>", "<|pad|>")


def config_of(model: str) -> Any:
    """The configuration of SmolLM2-135M or of Qwen3-0.6B.

    Matrices have more than the usual standard deviation of 0.02: at that, greedy answers repeat one token.
    """
    from transformers import LlamaConfig, Qwen3Config

    common: dict[str, Any] = {
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    if model == "M1":
        return LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            **common,
        )
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        **common,
    )


def write_checkpoint(folder: Path, model: str) -> None:
    """Write config.json, safetensors and a tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(20261130)
    config = config_of(model)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        network.get_input_embeddings().weight.mul_(2)
    network.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """A byte-level BPE in which every id of a vocabulary has a text: bytes, and then made-up words.

    Its one merge is there because readers of GGUF ask for one.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    texts = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt"]
    texts += [f"Ġt{number}" for number in range(len(texts), vocabulary)]
    ids = {text: number for number, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[("Ġ", "t")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    begin, end, pad = SPECIAL
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=begin, eos_token=end, pad_token=pad
    ).save_pretrained(folder)


def main() -> None:
    """Write what is missing. A file appears under its name when it is whole."""
    folder = Path(sys.argv[1])
    for model in sys.argv[2:]:
        checkpoint = checkpoint_folder(folder, model)
        if not checkpoint.exists():
            partial = checkpoint.with_name(checkpoint.name + ".partial")
            write_checkpoint(partial, model)
            partial.rename(checkpoint)
        for dtype in ("bf16", "f16", "f32"):
            path = gguf_file(folder, model, dtype)
            if not path.exists():
                partial = path.with_name(path.name + ".partial")
                write_gguf(checkpoint, partial, dtype)
                partial.rename(path)


if __name__ == "__main__":
    main()
