"""Tiny checkpoints whose answers are known, and the plain way to ask transformers for its own.

A random model of `llama_config` has best logits that lie far apart, so that rounding never changes a greedy
token. `byte_tokenizer` gives any of them text.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from byte_tokenizer import BOS, EOS

VOCAB = 320


def save_random(config: PretrainedConfig, path: Path, *, seed: int = 0) -> Path:
    """Write a random float32 model of `config`, norms and biases random too, so that none can be left out."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "norm" in name or ".ln_" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(path)
    return path


def llama_config(**changes: Any) -> PretrainedConfig:
    """M-rand's configuration: 2 layers, 4 heads over 2 KV heads, logits far apart."""
    from transformers import LlamaConfig

    return LlamaConfig(**(_SIZES | changes))


_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.5,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}


def random_sizes(**changes: Any) -> dict[str, Any]:
    """Sizes like M-rand's, for the configuration of another family."""
    return _SIZES | changes


def gpt2_config(**changes: Any) -> PretrainedConfig:
    """A GPT-2 of M-rand's sizes."""
    from transformers import GPT2Config

    sizes = {
        "vocab_size": VOCAB,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
        "initializer_range": 0.5,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    return GPT2Config(**(sizes | changes))


def gemma_config(generation: int, **changes: Any) -> PretrainedConfig:
    """A Gemma 1, 2 or 3 of M-rand's sizes, with windows of 9 tokens in every other layer from Gemma 2 on."""
    from transformers import Gemma2Config, Gemma3TextConfig, GemmaConfig

    # Embeddings are scaled by sqrt(hidden_size), and are the head too: small ones keep logits apart.
    sizes = _SIZES | {
        "head_dim": 24,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "initializer_range": 0.3,
    }
    if generation == 1:
        return GemmaConfig(**(sizes | changes))
    sizes |= {
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 40,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    return (Gemma2Config if generation == 2 else Gemma3TextConfig)(**(sizes | changes))


def mixtral_config(**changes: Any) -> PretrainedConfig:
    """A Mixtral of M-rand's sizes: two of five experts a token."""
    from transformers import MixtralConfig

    return MixtralConfig(**(_SIZES | {"num_local_experts": 5, "num_experts_per_tok": 2} | changes))


def qwen3_moe_config(**changes: Any) -> PretrainedConfig:
    """A Qwen3 of M-rand's sizes with experts in the last two of its three layers: three of eight a token."""
    from transformers import Qwen3MoeConfig

    sizes = _SIZES | {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    }
    return Qwen3MoeConfig(**(sizes | changes))


class Oracle:
    """transformers' answers, in float32 if `options` do not say otherwise."""

    def __init__(self, path: Path, **options: Any) -> None:
        options = {"dtype": torch.float32, **options}
        self.model = AutoModelForCausalLM.from_pretrained(path, **options).eval()

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Return logits [len(ids), vocab]."""
        return self.model(torch.tensor([list(ids)])).logits[0]

    @torch.inference_mode()
    def greedy(self, ids: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """Return `count` greedy tokens and, for each, how far its logit lay above the second best."""
        prompt = torch.tensor([list(ids)])
        answer = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
            repetition_penalty=1.0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(answer.logits).topk(2, dim=-1).values
        return answer.sequences[0, len(ids) :].tolist(), (best[:, 0] - best[:, 1]).tolist()


def same_tokens(ours: Sequence[int], oracle: Sequence[int], gaps: Sequence[float], tie: float = 1e-3) -> bool:
    """Whether two greedy answers agree up to the first place where the oracle itself was undecided."""
    for mine, theirs, gap in zip(ours, oracle, gaps, strict=True):
        if mine != theirs:
            return gap < tie
    return True
