"""Decode steps in CUDA graphs on a device: the steps that the stand-ins replay on the CPU."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "pagedattn"))
from interpret_graphs import (  # ty: ignore[import-not-found]
    BLOCK_SIZE,
    HIDDEN,
    MAX_LENGTH,
    STEPS,
    Layers,
    step,
)

from pagedattn import CaptureError, capture, cuda_graphs, estimate_graph_bytes

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def example(tokens):
    return torch.zeros(tokens, HIDDEN, device=DEVICE), torch.zeros(tokens, dtype=torch.int64, device=DEVICE)


def captured(run):
    return capture(run, example, block_size=BLOCK_SIZE, max_tokens=64, max_seqs=4, max_length=MAX_LENGTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_steps_give_what_the_function_gives(dtype):
    layers, plain = Layers(dtype, DEVICE), Layers(dtype, DEVICE)
    program = captured(layers)
    assert not layers.cache.float().any(), "capture stored something"
    for name, (given, shape) in STEPS.items():
        inputs, batch = step(*given, device=DEVICE)
        calls = layers.calls
        for got, right in zip(program(inputs, batch), plain(inputs, batch), strict=True):
            assert float((got - right).abs().max()) <= 1e-4, name
        assert layers.calls - calls == (shape is None), name
        # A float8 code may be the next one where rounding differs.
        torch.testing.assert_close(layers.cache.float(), plain.cache.float(), rtol=0.07, atol=1e-4)


def test_memory_is_estimated_before():
    layers = Layers(torch.float32, DEVICE)
    limits = {"block_size": BLOCK_SIZE, "max_seqs": 256, "max_length": MAX_LENGTH}
    estimated = estimate_graph_bytes(layers, example, **limits)
    taken = capture(layers, example, max_tokens=256, **limits).nbytes
    assert 0 < taken <= 1.5 * estimated + (64 << 20)


def test_what_waits_for_the_device_is_refused_and_the_device_goes_on():
    before = torch.cuda.current_stream()
    with pytest.raises(CaptureError, match="no CUDA graph of 4 decodes"):
        captured(lambda inputs, batch: (inputs[0] * batch.lengths.max().item(),))
    assert torch.cuda.current_stream() == before
    assert float(torch.ones(3, device=DEVICE).sum()) == 3.0
    captured(Layers(torch.float32, DEVICE))


def test_the_torch_back_end_has_no_graphs(monkeypatch):
    monkeypatch.setenv("OCTAVO_ATTENTION_BACKEND", "torch")
    with pytest.raises(CaptureError, match="the back end torch"):
        captured(Layers(torch.float32, DEVICE))
    with pytest.raises(CaptureError, match="the back end torch"):
        cuda_graphs.estimate_graph_bytes(
            Layers(torch.float32, DEVICE), example, block_size=4, max_seqs=4, max_length=8
        )
