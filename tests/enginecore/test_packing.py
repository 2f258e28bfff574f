"""Packed linear layers beside torch's, and the types that their weights are stored in."""

import pytest
import torch
from torch.nn import functional as F

from collectives import ColumnParallelLinear, LocalCommunicator, ParallelLMHead, VocabParallelEmbedding
from enginecore.worker.weights import packing
from enginecore.worker.weights.packing import OneDNNLinear, PackedLinear, Packer


def layer_with(weight, dtype=torch.float32, bias=False):
    layer = ColumnParallelLinear(
        weight.shape[1], weight.shape[0], bias=bias, comm=LocalCommunicator(), dtype=dtype
    )
    layer.load_weight(weight)
    if bias:
        layer.load_bias(torch.linspace(-1, 1, weight.shape[0]))
    return layer


def pack(layer, quantization=None):
    Packer(layer.weight.dtype, torch.device("cpu"), quantization).pack(layer)


def random_weight(dtype, rows=70):
    return torch.randn(rows, 33, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_float32_layers_keep_what_the_checkpoint_stores(stored):
    weight, x = random_weight(stored, rows=1100), torch.randn(5, 33)
    layer = layer_with(weight, bias=True)
    pack(layer)
    assert isinstance(layer.matmul, PackedLinear)
    assert layer.matmul.weight.dtype == stored
    assert layer.weight.numel() == 0
    expected = F.linear(x.double(), weight.double(), torch.linspace(-1, 1, 1100).double())
    assert (layer(x) - expected).abs().max() < 1e-4


def test_one_value_that_16_bits_do_not_hold_keeps_the_weight_in_float32():
    for value in (1 + 2.0**-20, 1e30, torch.nan):
        weight = random_weight(torch.float16, rows=1100).float()
        weight[1099, 32] = value
        layer = layer_with(weight)
        pack(layer)
        assert layer.matmul.weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_layers_in_half_precision(dtype):
    weight, x = random_weight(dtype), torch.randn(5, 33).to(dtype)
    layer = layer_with(weight, dtype)
    pack(layer)
    assert isinstance(layer.matmul, PackedLinear)
    expected = F.linear(x.double(), weight.double())
    assert (layer(x) - expected).abs().max() < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_compiler_layers_are_onednns(dtype, monkeypatch):
    monkeypatch.setattr(packing, "backend_name", lambda device: "torch")
    weight, x = random_weight(dtype), torch.randn(5, 33).to(dtype)
    layer = layer_with(weight, dtype)
    pack(layer)
    assert isinstance(layer.matmul, OneDNNLinear)
    assert (layer(x) - F.linear(x.double(), weight.double())).abs().max() < 0.1


def test_a_tied_head_leaves_the_embedding_its_weight():
    embedding = VocabParallelEmbedding(70, 33, comm=LocalCommunicator())
    embedding.load_weight(random_weight(torch.float32))
    head = ParallelLMHead(70, 33, comm=LocalCommunicator())
    head.tie(embedding)
    pack(head)
    assert embedding.weight.shape == (70, 33)
    x = torch.randn(2, 33)
    assert torch.allclose(head(x), F.linear(x, embedding.weight), atol=1e-4)


def test_float64_layers_stay_as_they_are():
    layer = layer_with(random_weight(torch.float64), torch.float64)
    pack(layer)
    assert layer.matmul is F.linear
    assert layer.weight.shape == (70, 33)
