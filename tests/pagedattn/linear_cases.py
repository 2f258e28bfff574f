"""What tests of linear layers share: random numbers, and the product that float64 gives."""

import numpy as np
import torch

SINGLE, HALF, BFLOAT = torch.float32, torch.float16, torch.bfloat16
BACKENDS = ["torch", "cpu"]
# Units in the last place of the result's dtype, of the sum of magnitudes, that rounding once may take.
ROUNDING = {SINGLE: 2.0**-24, HALF: 2.0**-11, BFLOAT: 2.0**-8}


def numbers(*shape, dtype=SINGLE, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_product(result, x, weight, bias=None):
    """The result differs from float64 by rounding once, and by what sums of float32 lose."""
    x, weight = x.double().numpy(), weight.double().numpy()
    exact, magnitude = x @ weight.T, np.abs(x) @ np.abs(weight).T
    if bias is not None:
        exact, magnitude = exact + bias.double().numpy(), magnitude + np.abs(bias.double().numpy())
    assert result.shape == exact.shape
    # A sum of k terms loses sqrt(k) units of float32 where errors are independent; 4 leaves room for chance.
    allowed = 4 * (x.shape[-1] + 1) ** 0.5 * 2.0**-24 * magnitude + ROUNDING[result.dtype] * np.abs(exact)
    assert (np.abs(result.double().numpy() - exact) <= allowed + 2.0**-24).all()
