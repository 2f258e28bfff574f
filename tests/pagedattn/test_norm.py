import numpy as np
import pytest
import torch

from pagedattn import layer_norm, rms_norm


def expected_norm(x, weight, eps):
    x, weight = x.double().numpy(), weight.double().numpy()
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)], ids=str
)
def test_rms_norm(dtype, tolerance):
    torch.manual_seed(0)
    for shape in ((7, 96), (3, 5, 64), (0, 32)):
        x, weight = torch.randn(shape).to(dtype), (1 + torch.randn(shape[-1]) / 4).to(dtype)
        result = rms_norm(x, weight, 1e-5)
        assert result.dtype == dtype
        assert np.abs(result.double().numpy() - expected_norm(x, weight, 1e-5)).max(initial=0) < tolerance


def test_residual_is_added_first_and_returned():
    x, residual, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]]), torch.tensor([1.0, 2.0])
    normed, total = rms_norm(x, weight, 0.0, residual)
    assert total.tolist() == [[3.0, 4.0]]
    # sqrt((9 + 16) / 2) = 3.5355
    assert normed[0].tolist() == pytest.approx([3 / 3.5355339, 8 / 3.5355339])
    assert (x.tolist(), residual.tolist()) == ([[1.0, 2.0]], [[2.0, 2.0]])


def test_half_precision_does_not_overflow_in_the_square():
    x = torch.full((1, 4), 3e4, dtype=torch.float16)
    assert rms_norm(x, torch.ones(4, dtype=torch.float16), 1e-6).tolist() == [[1.0, 1.0, 1.0, 1.0]]


def test_a_float32_weight_keeps_its_precision_over_bfloat16_input():
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    # 1.00390625 lies halfway between two bfloat16 numbers; scaled by 2 it would be lost if rounded early.
    assert rms_norm(2 * x, torch.tensor([2.015625, 1.0]), 0.0)[0, 0].item() == 2.015625


def test_zeros_stay_zeros():
    assert not rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).any()


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"weight must be \[8\], not \[4\]"):
        rms_norm(torch.zeros(2, 8), torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match=r"residual is \[1, 8\]"):
        rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6, torch.zeros(1, 8))


def expected_layer_norm(x, weight, bias, eps):
    x, weight, bias = (part.double().numpy() for part in (x, weight, bias))
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps) * weight + bias


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 4e-6), (torch.float16, 8e-3), (torch.bfloat16, 6e-2)], ids=str
)
def test_layer_norm(dtype, tolerance, backend):
    torch.manual_seed(0)
    for shape in ((7, 96), (3, 5, 61), (0, 32), (2, 1), (1, 1000)):
        x = (3 + torch.randn(shape)).to(dtype)
        weight, bias = (1 + torch.randn(shape[-1]) / 4).to(dtype), torch.randn(shape[-1]).to(dtype)
        residual = torch.randn(shape).to(dtype)
        result = layer_norm(x, weight, bias, 1e-5, backend=backend)
        assert (result.dtype, result.shape) == (dtype, x.shape)
        expected = expected_layer_norm(x, weight, bias, 1e-5)
        assert np.abs(result.double().numpy() - expected).max(initial=0) < tolerance
        normed, total = layer_norm(x, weight, bias, 1e-5, residual, backend=backend)
        assert torch.equal(total, x + residual)
        assert torch.equal(normed, layer_norm(total, weight, bias, 1e-5, backend=backend))


def test_layer_norm_keeps_small_differences_of_large_numbers():
    x = 1e4 + torch.arange(64.0).unsqueeze(0)
    result = layer_norm(x, torch.ones(64), torch.zeros(64), 0.0)
    assert result[0, -1].item() == pytest.approx(31.5 / np.sqrt((64**2 - 1) / 12), rel=1e-5)


def test_layer_norm_refuses_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"weight must be \[8\], not \[4\]"):
        layer_norm(torch.zeros(2, 8), torch.ones(4), torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match=r"bias must be \[8\], not \[1\]"):
        layer_norm(torch.zeros(2, 8), torch.ones(8), torch.ones(1), 1e-6)
