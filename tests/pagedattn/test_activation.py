import math

import pytest
import torch

from pagedattn import activation, gelu_and_mul, silu_and_mul

GATE, UP = [-3.0, -0.5, 0.0, 1.25], [2.0, -1.0, 5.0, 0.5]
X = torch.tensor([GATE + UP])


def test_silu_and_mul():
    expected = [gate / (1 + math.exp(-gate)) * up for gate, up in zip(GATE, UP)]
    assert silu_and_mul(X)[0].tolist() == pytest.approx(expected, abs=2e-6)


def test_gelu_and_mul_with_erf():
    expected = [gate / 2 * (1 + math.erf(gate / math.sqrt(2))) * up for gate, up in zip(GATE, UP)]
    assert gelu_and_mul(X, "none")[0].tolist() == pytest.approx(expected, abs=2e-6)


def test_gelu_and_mul_with_tanh_is_the_default():
    inner = [math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3) for gate in GATE]
    expected = [gate / 2 * (1 + math.tanh(t)) * up for gate, t, up in zip(GATE, inner, UP)]
    assert gelu_and_mul(X)[0].tolist() == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("function", [silu_and_mul, gelu_and_mul])
def test_leading_dimensions_and_dtype_are_kept_and_the_input_too(function):
    x = torch.randn(2, 3, 8).bfloat16()
    before = x.clone()
    result = function(x)
    assert (result.shape, result.dtype) == ((2, 3, 4), torch.bfloat16)
    assert torch.equal(x, before)


def test_an_odd_width_is_refused():
    with pytest.raises(ValueError, match="even width, not 3"):
        silu_and_mul(torch.zeros(1, 3))


EXPECTED = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x / 2 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: max(x, 0.0),
}


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("kind", EXPECTED)
def test_activations_without_a_gate(kind, backend):
    x = torch.linspace(-6, 6, 3 * 37).view(3, 37)
    result = activation(x, kind, backend=backend)
    assert result.flatten().tolist() == pytest.approx(
        [EXPECTED[kind](one) for one in x.flatten().tolist()], abs=2e-6
    )
    assert activation(x.bfloat16(), kind, backend=backend).dtype == torch.bfloat16
    assert torch.allclose(activation(x[:, ::2], kind, backend=backend), result[:, ::2], atol=2e-6)


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="kind must be one of silu, gelu, gelu_tanh, relu, not 'tanh'"):
        activation(X, "tanh")
