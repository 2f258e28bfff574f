import math

import numpy as np
import pytest
import torch

from pagedattn import rotary


def cos_sin_cache(max_position, rotary_dim, theta=10000.0):
    frequencies = theta ** -(torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    angles = torch.arange(max_position).double()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def turned(x, position, rotary_dim, interleaved, theta=10000.0):
    """One head `x` as complex numbers, in Python floats."""
    result = list(x)
    half = rotary_dim // 2
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        angle = position * theta ** (-2 * i / rotary_dim)
        number = complex(x[first], x[second]) * complex(math.cos(angle), math.sin(angle))
        result[first], result[second] = number.real, number.imag
    return result


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 8, 2])
def test_rotary(interleaved, rotary_dim):
    torch.manual_seed(0)
    query, key = torch.randn(4, 3, 16), torch.randn(4, 1, 16)
    positions = torch.tensor([0, 99, 7, 7])
    results = rotary(query, key, positions, cos_sin_cache(100, rotary_dim), interleaved)
    for given, result in zip((query, key), results):
        for token, position in enumerate(positions.tolist()):
            for head in range(given.shape[1]):
                expected = turned(given[token, head].tolist(), position, rotary_dim, interleaved)
                assert np.allclose(result[token, head].numpy(), expected, atol=2e-6)


def test_rows_indexed_beforehand_give_the_same():
    query, key, positions = torch.randn(3, 2, 8), torch.randn(3, 1, 8), torch.tensor([5, 0, 2])
    cache = cos_sin_cache(6, 8)
    by_position = rotary(query, key, positions, cache)
    by_row = rotary(query, key, None, cache[positions])
    assert all(torch.equal(one, other) for one, other in zip(by_position, by_row))


def test_bfloat16_is_turned_in_the_precision_of_the_cache():
    query = torch.randn(5, 2, 16).bfloat16()
    positions = torch.arange(5) * 20
    cache = cos_sin_cache(100, 16)
    result, _ = rotary(query, query, positions, cache)
    exact, _ = rotary(query.float(), query.float(), positions, cache)
    assert torch.equal(result, exact.bfloat16())


def test_slices_of_a_fused_projection_are_left_alone():
    fused = torch.randn(3, 4, 8)
    before = fused.clone()
    rotary(fused[:, :2], fused[:, 2:3], torch.arange(3), cos_sin_cache(3, 8))
    assert torch.equal(fused, before)


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_relative_positions_only(interleaved):
    torch.manual_seed(0)
    query, key, cache = torch.randn(1, 1, 32), torch.randn(1, 1, 32), cos_sin_cache(600, 32)

    def score(query_position, key_position):
        q, _ = rotary(query, key, torch.tensor([query_position]), cache, interleaved)
        _, k = rotary(query, key, torch.tensor([key_position]), cache, interleaved)
        return (q * k).sum().item()

    assert score(40, 3) == pytest.approx(score(540, 503), abs=1e-4)


@pytest.mark.parametrize("rotary_dim", [7, 18])
def test_rotary_dims_that_do_not_fit_are_refused(rotary_dim):
    rows = torch.zeros(1, rotary_dim)
    with pytest.raises(ValueError, match=f"rotary_dim {rotary_dim} must be even and within"):
        rotary(torch.zeros(1, 1, 16), torch.zeros(1, 1, 16), None, rows)


def test_a_row_short_is_refused():
    with pytest.raises(ValueError, match="3 queries, 3 keys and 2 positions"):
        rotary(torch.zeros(3, 1, 8), torch.zeros(3, 1, 8), None, torch.zeros(2, 8))
