"""Models whose linear layers are quantised while they are loaded."""

import pytest
import torch

from checkpoints import gpt2_config, llama_config, mixtral_config, save_random
from collectives import ExpertPlacement, LocalCommunicator, ParallelLinear
from cores import Ask, run, start_core
from enginecore.core.engine_core import EngineCore
from enginecore.errors import ConfigError
from enginecore.executor.executor import make_executor
from enginecore.model_files import locate
from enginecore.worker.models.parallel import ModelParallel
from enginecore.worker.weights.loading import empty_decoder
from enginecore.worker.weights.packing import PackedLinear, check_quantization, packed_bytes
from executors import options
from model_steps import load
from pagedattn import pack_experts, pack_linear

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


def kinds_of(decoder, kind):
    """How each linear layer of a dense model is quantised: some that int4 would spoil have int8."""
    finer = "int8" if kind == "int4" else kind
    kinds = {decoder.head: finer}
    for layer in decoder.layers:
        kinds |= {layer.attention.qkv: finer, layer.attention.o: kind}
        kinds |= {layer.mlp.up: kind, layer.mlp.down: finer}
    return kinds


@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_has_the_rounded_weight(model, kind):
    plain, quantised = (load(model, quantization=each) for each in (None, kind))
    for one, other in zip(linear_layers(plain), linear_layers(quantised), strict=True):
        assert isinstance(one.matmul, PackedLinear)
        own = kinds_of(quantised, kind)[other]
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
            own = kinds_of(decoder, kind)[layer]
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
    assert 1 / 8 < sizes["int4"] / sizes[None] < 0.85 * sizes["int8"] / sizes[None]  # some layers in int8


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return save_random(mixtral_config(), tmp_path_factory.mktemp("mixture"))


@pytest.mark.parametrize("kind", KINDS)
def test_experts_have_the_rounded_weights_and_the_router_its_own(mixture, kind):
    plain, quantised = (load(mixture, quantization=each) for each in (None, kind))
    for one, other in zip(plain.layers, quantised.layers, strict=True):
        own = (kind, "int8" if kind == "int4" else kind)  # of the gate and up projections, and of down
        for weight, rounded, each in zip(one.mlp.experts.packed, other.mlp.experts.packed, own, strict=True):
            assert rounded.quantization == each
            expected = [pack_linear(part, quantization=each).unpack() for part in weight.unpack().float()]
            assert torch.equal(rounded.unpack(), torch.stack(expected))
        gate = other.mlp.router.gate.matmul.weight
        assert gate.quantization is None
        assert torch.equal(gate.unpack(), one.mlp.router.gate.matmul.weight.unpack())


@pytest.mark.parametrize("kind", KINDS)
def test_answers_of_quantised_experts_are_those_of_their_rounded_weights(mixture, kind):
    asks = [Ask([5, 9, 3 * number], 12) for number in range(1, 6)]
    core = start_core(mixture, quantization=kind, enforce_eager=True)
    eager = [answer.tokens for answer in run(core, asks)]
    assert [answer.tokens for answer in run(start_core(mixture, quantization=kind), asks)] == eager
    for layer in core._executor._worker._model.layers:
        experts = layer.mlp.experts
        if kind != "int8-dynamic":  # which rounds what is multiplied, too
            experts.packed = tuple(pack_experts(weight.unpack()) for weight in experts.packed)
    assert [answer.tokens for answer in run(core, asks)] == eager


class Seat(LocalCommunicator):
    """A rank of two whose other is not there: enough to see what is loaded."""

    size = 2

    def __init__(self, rank):
        self.rank = rank


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_rounds_its_slices_or_its_own_experts(mixture, kind, expert_parallel, rank):
    spread = {"ep": Seat(rank), "placements": (ExpertPlacement(5, ((0, 1, 2), (3, 4))),)}
    plain, quantised = (
        load(mixture, Seat(rank), quantization=each, **(spread if expert_parallel else {}))
        for each in (None, kind)
    )
    for one, other in zip(plain.layers, quantised.layers, strict=True):
        for weight, rounded in zip(one.mlp.experts.packed, other.mlp.experts.packed, strict=True):
            assert rounded.shape == weight.shape
            own = rounded.quantization
            expected = [pack_linear(each, quantization=own).unpack() for each in weight.unpack().float()]
            assert torch.equal(rounded.unpack(), torch.stack(expected))


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_two_ranks_with_quantised_experts_answer(mixture, expert_parallel):
    """As one rank does, but for slices of inputs, which have scales of their own."""
    asks = [Ask([5, 9, 3 * number], 4) for number in range(1, 4)]
    alone = [answer.tokens for answer in run(start_core(mixture, quantization="int8"), asks)]
    config = options(
        mixture, tensor_parallel_size=2, enable_expert_parallel=expert_parallel, quantization="int8"
    )
    executor = make_executor(config, locate(config.model))
    try:
        found = [answer.tokens for answer in run(EngineCore(config, executor), asks)]
    finally:
        executor.shutdown()
    assert found == alone


def test_what_cannot_be_quantised_is_refused(tmp_path):
    dense = load(save_random(llama_config(), tmp_path / "dense"))
    with pytest.raises(ConfigError, match="quantization=int4: there are kernels for CPUs, not for cuda"):
        check_quantization(dense, torch.device("cuda"), "int4")
    with pytest.raises(ConfigError, match="quantization"):
        start_core(tmp_path / "dense", quantization="awq")
