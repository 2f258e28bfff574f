"""Models whose linear layers are quantised while they are loaded."""

import pytest
import torch

from checkpoints import gpt2_config, llama_config, mixtral_config, save_random
from collectives import LocalCommunicator, ParallelLinear, ParallelLMHead
from cores import Ask, run, start_core
from enginecore.errors import ConfigError
from enginecore.model_files import locate
from enginecore.worker.models.parallel import ModelParallel
from enginecore.worker.weights.loading import empty_decoder
from enginecore.worker.weights.packing import PackedLinear, check_quantization, packed_bytes
from model_steps import load
from pagedattn import pack_linear

KINDS = ("int8", "int8-dynamic", "int4")
CONFIGS = {
    "llama": llama_config(),
    "llama, tied": llama_config(tie_word_embeddings=True, attention_bias=True),
    "gpt2": gpt2_config(),
}


@pytest.fixture(scope="module", params=CONFIGS)
def model(request, tmp_path_factory):
    return save_random(CONFIGS[request.param], tmp_path_factory.mktemp("model"))


def linear_layers(decoder):
    return [layer for layer in decoder.modules() if isinstance(layer, ParallelLinear)]


@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_has_the_rounded_weight(model, kind):
    plain, quantised = (load(model, quantization=each) for each in (None, kind))
    for one, other in zip(linear_layers(plain), linear_layers(quantised), strict=True):
        assert isinstance(one.matmul, PackedLinear)
        is_head = isinstance(one, ParallelLMHead)
        own = "int8" if is_head and kind == "int4" else kind
        expected = pack_linear(one.matmul.weight.unpack().float(), quantization=own)
        assert other.matmul.weight.quantization == own
        assert torch.equal(other.matmul.weight.unpack(), expected.unpack())
        assert not other.weight.numel()


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_rounded_weights(model, kind):
    """Of the modules, and of the program of the layers; int8-dynamic also rounds what is multiplied."""
    asks = [Ask([5, 9, 3 * number], 12) for number in range(1, 6)]
    found = [answer.tokens for answer in run(start_core(model, quantization=kind), asks)]
    assert found == [
        answer.tokens for answer in run(start_core(model, quantization=kind, enforce_eager=True), asks)
    ]
    if kind != "int8-dynamic":
        rounded = start_core(model, enforce_eager=True)
        decoder = rounded._executor._worker._model
        if decoder.head.tied:  # the embedding is not rounded
            decoder.embed.look_up_in(decoder.head.matmul.weight.unpack())
        for layer in linear_layers(decoder):
            own = "int8" if isinstance(layer, ParallelLMHead) else kind
            weight = pack_linear(layer.matmul.weight.unpack().float(), quantization=own).unpack()
            layer.matmul.weight.data.copy_(pack_linear(weight).data)
        assert found == [answer.tokens for answer in run(rounded, asks)]


def test_memory_is_as_small_as_was_planned(tmp_path):
    path = save_random(llama_config(hidden_size=256, intermediate_size=512), tmp_path)
    planned = empty_decoder(
        locate(str(path)),
        ModelParallel(LocalCommunicator()),
        layers=None,
        dtype=torch.float32,
        device=torch.device("meta"),
        max_positions=512,
    )
    sizes = {}
    for kind in (None, *KINDS):
        layers = linear_layers(load(path, quantization=kind))
        assert not any(layer.weight.numel() for layer in layers)
        sizes[kind] = sum(layer.matmul.weight.nbytes for layer in layers)
        others = planned.num_bytes - sizes[None]
        assert packed_bytes(planned, kind) == pytest.approx(sizes[kind] + others, rel=0.05)
    assert sizes["int8"] / sizes[None] == pytest.approx(1 / 4, rel=0.05)
    assert sizes["int4"] / sizes[None] == pytest.approx(1 / 8, rel=0.3)  # the head in int8


def test_what_cannot_be_quantised_is_refused(tmp_path):
    experts = save_random(mixtral_config(), tmp_path / "experts")
    with pytest.raises(ConfigError, match="quantization=int8: the model has experts"):
        start_core(experts, quantization="int8")
    dense = load(save_random(llama_config(), tmp_path / "dense"))
    with pytest.raises(ConfigError, match="quantization=int4: there are kernels for CPUs, not for cuda"):
        check_quantization(dense, torch.device("cuda"), "int4")
    with pytest.raises(ConfigError, match="quantization"):
        start_core(tmp_path / "dense", quantization="awq")
