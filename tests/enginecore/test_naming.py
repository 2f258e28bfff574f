"""Tensors find their places under the names and in the layouts that checkpoints have used."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import gpt2_config, mixtral_config, qwen3_moe_config, random_sizes, save_random
from enginecore.errors import ModelError
from model_steps import load, run_stages

IDS = [(5 * i * i + i + 3) % 256 for i in range(20)]


def rewrite(path, change):
    """Replace the tensors of a checkpoint by what `change` makes of them."""
    file = path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file({name: t.contiguous() for name, t in change(tensors).items()}, file, metadata={"format": "pt"})


def logits(path):
    return run_stages([load(path)], IDS, prefill=len(IDS))


def test_gpt2_without_the_prefix_and_with_its_old_buffers(tmp_path):
    path = save_random(gpt2_config(), tmp_path)
    expected = logits(path)

    def older(tensors):
        plain = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        return plain | {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.0.attn.masked_bias": torch.tensor(-1e4)}

    rewrite(path, older)
    torch.testing.assert_close(logits(path), expected, atol=0, rtol=0)


@pytest.mark.parametrize("config", [mixtral_config, qwen3_moe_config])
def test_experts_as_one_tensor_a_layer(config, tmp_path):
    path = save_random(config(), tmp_path)
    expected = logits(path)
    rewrite(path, fuse_experts)
    torch.testing.assert_close(logits(path), expected, atol=0, rtol=0)


def fuse_experts(tensors):
    """Stack each layer's experts, gate above up, as transformers 5 has them in memory."""
    older = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    fused = {}
    for layer in range(3):
        prefix = f"model.layers.{layer}."
        for block, names in (("block_sparse_moe", older), ("mlp", {name: name for name in older})):
            stacks = {}
            for name, stored in names.items():
                keys = [f"{prefix}{block}.experts.{e}.{stored}.weight" for e in range(8)]
                stacks[name] = [tensors.pop(key) for key in keys if key in tensors]
            if stacks["down_proj"]:
                gate_up = [torch.cat(pair) for pair in zip(stacks["gate_proj"], stacks["up_proj"])]
                fused[f"{prefix}mlp.experts.gate_up_proj"] = torch.stack(gate_up)
                fused[f"{prefix}mlp.experts.down_proj"] = torch.stack(stacks["down_proj"])
                if block != "mlp":
                    fused[f"{prefix}mlp.gate.weight"] = tensors.pop(f"{prefix}{block}.gate.weight")
    return tensors | fused


def phi3_config():
    from transformers import Phi3Config

    return Phi3Config(**random_sizes(pad_token_id=0))


@pytest.mark.parametrize(
    ("config", "name", "shape", "message"),
    [
        (
            phi3_config,
            "model.layers.1.self_attn.qkv_proj.weight",
            (127, 64),
            r"64 \+ 32 \+ 32 = 128 .*\[127, 64\]",
        ),
        (gpt2_config, "transformer.h.0.attn.c_attn.weight", (64, 190), r"64 \+ 64 \+ 64 = 192 .*\[190, 64\]"),
        (gpt2_config, "transformer.wpe.weight", (511, 64), r"expected shape \[512, 64\], got \[511, 64\]"),
        (
            mixtral_config,
            "model.layers.0.block_sparse_moe.experts.3.w2.weight",
            (64, 95),
            r"expected shape \[64, 96\], got \[64, 95\]",
        ),
        (
            qwen3_moe_config,
            "model.layers.1.mlp.gate.weight",
            (7, 64),
            r"expected shape \[8, 64\], got \[7, 64\]",
        ),
        (
            qwen3_moe_config,
            "model.layers.1.mlp.experts.gate_up_proj",
            (8, 79, 64),
            r"expected shape \[8, 80, 64\], got \[8, 79, 64\]",
        ),
    ],
)
def test_a_wrong_shape_is_named_with_both_shapes(config, name, shape, message, tmp_path):
    path = save_random(config(), tmp_path)
    rewrite(path, lambda tensors: tensors | {name: torch.zeros(shape)})
    with pytest.raises(ModelError, match=f"tensor {name}: .*{message}"):
        load(path)


def test_an_expert_too_many_or_too_few_is_named(tmp_path):
    path = save_random(mixtral_config(), tmp_path)
    extra = "model.layers.0.block_sparse_moe.experts.5.w1.weight"
    rewrite(path, lambda tensors: tensors | {extra: torch.zeros(96, 64)})
    with pytest.raises(ModelError, match=f"{extra} has no place"):
        load(path)
    last = "model.layers.1.block_sparse_moe.experts.4.w3.weight"
    rewrite(path, lambda tensors: {k: v for k, v in tensors.items() if k not in (extra, last)})
    with pytest.raises(ModelError, match=r"1 tensors are in no file, first .*1\.mlp\.experts\.4\.up_proj"):
        load(path)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (gpt2_config, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        (gpt2_config, {"activation_function": "quick_gelu"}, "activation_function 'quick_gelu'"),
        (mixtral_config, {"num_experts_per_tok": 6}, "6 is not between 1 and the 5 experts"),
    ],
)
def test_settings_that_are_not_supported_are_named(config, changes, message, tmp_path):
    path = save_random(config(), tmp_path)
    settings = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=message):
        load(path)
