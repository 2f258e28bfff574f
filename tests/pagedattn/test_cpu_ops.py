"""The C kernels around attention, against float64 and against the torch back end."""

import math

import numpy as np
import pytest
import torch

from pagedattn import gelu_and_mul, rms_norm, rotary, silu_and_mul, top_k_top_p_sample
from pairwise import parametrize_pairs

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
LARGEST = torch.finfo(torch.float32).max


def assert_rounded(result, exact, units=1.0):
    """Results differ from float64 by at most so many units in the last place of their dtype."""
    exact = torch.as_tensor(exact, dtype=torch.float64)
    info = torch.finfo(result.dtype)
    unit = torch.clamp(exact.abs().log2().floor().exp2(), min=info.tiny) * info.eps
    assert ((result.double() - exact).abs() <= units * unit).all()


@parametrize_pairs(dtype=FLOATS, weight_dtype=[*FLOATS, torch.float64], hidden=[1, 16, 67, 576])
def test_norms_are_rounded_once(dtype, weight_dtype, hidden):
    torch.manual_seed(hidden)
    x, weight = torch.randn(5, hidden).to(dtype), torch.randn(hidden).to(weight_dtype)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.float().double()
    # Half precision is rounded from float32, which is off by a few units of its own.
    assert_rounded(rms_norm(x, weight, 1e-5, backend="cpu"), exact, 4 if dtype == torch.float32 else 0.51)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_residual_is_rounded_before_it_is_normalised(dtype):
    torch.manual_seed(0)
    hidden = 100  # no multiple of a vector register
    x, residual, weight = (
        torch.randn(7, hidden).to(dtype),
        torch.randn(7, hidden).to(dtype),
        torch.rand(hidden),
    )
    normed, total = rms_norm(x, weight, 1e-5, residual, backend="cpu")
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, 1e-5, backend="cpu"))
    strided = rms_norm(x.T.contiguous().T, weight, 1e-5, residual[:, :], backend="cpu")
    assert torch.equal(strided[0], normed)
    assert torch.equal(strided[1], total)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norms_of_views(dtype):
    fused, weight = torch.randn(4, 6, 40).to(dtype), torch.randn(40).to(dtype)
    views = [fused[:, 1:4], fused[:, 2], fused[::2], fused[:, :, :40:2].unsqueeze(0), fused.transpose(0, 1)]
    for view in views:
        part = weight[: view.shape[-1]]
        result = rms_norm(view, part, 1e-6, backend="cpu")
        assert result.is_contiguous()
        assert torch.equal(result, rms_norm(view.contiguous(), part, 1e-6, backend="cpu"))


@parametrize_pairs(dtype=FLOATS, rotary_dim=[2, 10, 70, 128], interleaved=[False, True])
def test_rotary(dtype, rotary_dim, interleaved):
    torch.manual_seed(0)
    fused = torch.randn(6, 9, 128).to(dtype)
    query, key = fused[:, :5], fused[:, 5:8]
    angles = torch.rand(50, rotary_dim // 2).double() * 100
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).float()
    positions = torch.tensor([0, 49, 7, 7, 30, 1])
    results = rotary(query, key, positions, table, interleaved, backend="cpu")
    cos, sin = table[positions].double()[:, None].chunk(2, dim=-1)
    for given, result in zip((query, key), results):
        exact = given.double().clone()
        picked = (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2))
        if not interleaved:
            picked = (slice(0, rotary_dim // 2), slice(rotary_dim // 2, rotary_dim))
        one, other = (given.double()[..., part] for part in picked)
        exact[..., picked[0]], exact[..., picked[1]] = one * cos - other * sin, other * cos + one * sin
        assert result.is_contiguous()
        assert result.dtype == dtype
        # Where the two products cancel, an error of float32 is more than a unit of the result.
        assert (result.double() - exact).abs().max() <= 4 * torch.finfo(dtype).eps
        assert torch.equal(result[..., rotary_dim:], given[..., rotary_dim:])
    for others in (positions.int(), None):
        again = rotary(query, key, others, table if others is not None else table[positions], interleaved)
        assert all(map(torch.equal, again, results))


def test_a_table_in_half_precision_is_widened():
    query, key, table = torch.randn(3, 2, 16).bfloat16(), torch.randn(3, 1, 16).bfloat16(), torch.randn(9, 16)
    positions = torch.tensor([8, 0, 3])
    half = rotary(query, key, positions, table.bfloat16(), backend="cpu")
    assert all(map(torch.equal, half, rotary(query, key, positions, table.bfloat16().float(), backend="cpu")))


@pytest.mark.parametrize("position", [-1, 9])
def test_positions_outside_of_the_table_are_refused(position):
    query, positions = torch.zeros(3, 1, 8), torch.tensor([8, position, 0])
    with pytest.raises(IndexError, match=f"token 1 has position {position}; cos_sin has rows for 0 to 8"):
        rotary(query, query, positions, torch.zeros(9, 8), backend="cpu")


def gelu_tanh(x):
    return x / (1 + math.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "silu": (silu_and_mul, lambda x: x / (1 + math.exp(-x))),
    "tanh": (lambda x, **options: gelu_and_mul(x, "tanh", **options), gelu_tanh),
    "erf": (
        lambda x, **options: gelu_and_mul(x, "none", **options),
        lambda x: x * math.erfc(-x / math.sqrt(2)) / 2,
    ),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_activations_are_exact_to_rounding(dtype):
    gate = torch.linspace(-4.5, 6, 4001).to(dtype)
    for activate, exactly in ACTIVATIONS.values():
        result = activate(torch.cat((gate, torch.ones_like(gate))), backend="cpu")
        # In float32 e^x passes on what its argument was rounded by: a few units, more far below 0.
        assert_rounded(result, [exactly(x) for x in gate.tolist()], 32 if dtype == torch.float32 else 0.52)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_far_from_zero(name):
    gate = torch.tensor([-3e38, -1e4, -100, -30, 0, 30, 100, 3e38, math.inf, math.nan])
    result = ACTIVATIONS[name][0](torch.cat((gate, torch.ones_like(gate))), backend="cpu").tolist()
    assert result[:5] == pytest.approx([0] * 5, abs=3e-12)
    assert result[5:9] == pytest.approx([30, 100, float(gate[7]), math.inf])
    assert math.isnan(result[9])


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (1, 2), (3, 5, 70), (40,)])
def test_activations_of_any_shape(shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    wide = torch.randn(*shape[:-1], shape[-1] + 6)[..., : shape[-1]].copy_(x)
    for activate, _ in ACTIVATIONS.values():
        result = activate(x, backend="cpu")
        assert torch.allclose(result, activate(x, backend="torch"), atol=1e-6)
        assert torch.equal(activate(wide, backend="cpu"), result)


def test_float64_is_computed_in_float64():
    x = torch.rand(2, 8).double()
    assert torch.equal(silu_and_mul(x, backend="cpu"), silu_and_mul(x, backend="torch"))
    assert torch.equal(gelu_and_mul(x, backend="cpu"), gelu_and_mul(x, backend="torch"))
    heads = x[:, None]
    assert rotary(heads, heads, None, x.float(), backend="cpu")[0].dtype == torch.float64


def random_columns(generator, rows):
    """Settings of every kind, each in a good part of the rows."""

    def column(*choices):
        return torch.from_numpy(generator.choice(choices, rows))

    whole = np.iinfo(np.int64)
    return {
        "temperature": column(0.0, 1.0, 1.0, 0.3, 0.7, 2.5, 20.0).float(),
        "top_k": column(0, 0, -1, 1, 2, 3, 50, 700, 10**6).int(),
        "top_p": column(1.0, 1.0, 0.95, 0.5, 0.1, 0.999, 1e-6).float(),
        "min_p": column(0.0, 0.0, 0.05, 0.001, 1.0).float(),
        "seeds": torch.from_numpy(generator.integers(whole.min, whole.max, rows)),
        "positions": torch.from_numpy(generator.integers(0, 2**40, rows)),
    }


@pytest.mark.parametrize(
    ("vocab", "rows", "dtype"),
    [
        (1, 20, torch.float16),
        (90, 2000, torch.bfloat16),
        (1000, 2000, torch.float32),
        (5003, 1000, torch.float16),
        (5003, 1000, torch.bfloat16),
        (50_257, 100, torch.float32),
    ],
    ids=str,
)
def test_the_same_tokens_as_torch(vocab, rows, dtype):
    generator = np.random.default_rng(vocab)
    deviation = generator.choice([0.01, 0.5, 2, 6, 30], (rows, 1))
    logits = torch.from_numpy(generator.normal(size=(rows, vocab + 3)) * deviation).to(dtype)[:, 1:-2]
    masked = torch.from_numpy(generator.random(rows) < 0.3)
    hidden = torch.from_numpy(generator.random((rows, vocab)) < 0.9)
    logits[masked] = logits[masked].masked_fill(hidden[masked], -torch.inf)
    columns = random_columns(generator, rows)
    expected = top_k_top_p_sample(logits, **columns, backend="torch")
    assert torch.equal(top_k_top_p_sample(logits, **columns, backend="cpu"), expected)


def least_kept(logits, draws=3000, **settings):
    """The lowest logit among many draws of one row."""
    columns = random_columns(np.random.default_rng(0), draws)
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for name, default in defaults.items():
        columns[name].fill_(settings.get(name, default))
    return logits[top_k_top_p_sample(logits.expand(draws, -1), **columns, backend="cpu")].min().item()


@pytest.mark.parametrize("top_k", [1, 40, 41, 200, 4999])
def test_top_k_of_logits_in_every_order(top_k):
    ladder = torch.arange(5000, 0, -1) / 500
    for order in (ladder, ladder.flip(0), ladder[torch.randperm(5000)], ladder.view(50, 100).T.flatten()):
        # At so high a temperature the k-th is as likely as the first.
        kept = least_kept(order, 8 * top_k if top_k < 500 else 3000, top_k=top_k, temperature=1e6)
        assert kept >= (5001 - top_k) / 500 - 1e-6
        assert top_k > 500 or kept == pytest.approx((5001 - top_k) / 500, abs=top_k / 2500)


@pytest.mark.parametrize("masked", [-math.inf, -LARGEST])
def test_masked_logits_are_never_drawn(masked):
    logits = torch.full((4000,), masked)
    logits[::40] = torch.randn(100)
    for settings in ({}, {"top_p": 0.9}, {"top_k": 90}, {"min_p": 0.01}, {"top_k": 1000, "top_p": 0.999}):
        assert least_kept(logits, **settings) > -10


def test_equal_logits_are_all_kept():
    logits = torch.zeros(3000)
    for settings in ({"top_k": 5}, {"top_k": 2000}, {"top_p": 0.01}, {"top_p": 0.99}, {"min_p": 1.0}):
        columns = random_columns(np.random.default_rng(1), 2000) | {"temperature": torch.ones(2000)}
        columns |= {"top_k": torch.zeros(2000).int(), "top_p": torch.ones(2000), "min_p": torch.zeros(2000)}
        for name, value in settings.items():
            columns[name] = torch.full_like(columns[name], value)
        tokens = top_k_top_p_sample(logits.expand(2000, -1), **columns, backend="cpu")
        # 2000 draws of 3000 hit 3000 · (1 - e^(-2/3)) = 1460 different ones.
        assert tokens.unique().numel() == pytest.approx(1460, abs=60)


def test_infinity_counts_as_the_largest_number():
    logits = torch.zeros(1, 500)
    logits[0, 300], logits[0, 400], logits[0, 10] = LARGEST, math.inf, math.nan
    columns = random_columns(np.random.default_rng(0), 1) | {"temperature": torch.zeros(1)}
    assert top_k_top_p_sample(logits, **columns, backend="cpu").tolist() == [300]


def test_threads_change_nothing():
    generator, threads = np.random.default_rng(5), torch.get_num_threads()
    logits, columns = torch.randn(64, 3000), random_columns(generator, 64)
    x, weight, heads = torch.randn(300, 1024), torch.rand(1024), torch.randn(600, 4, 64)

    def everything():
        return (
            top_k_top_p_sample(logits, **columns, backend="cpu"),
            *rms_norm(x, weight, 1e-5, x, backend="cpu"),
            silu_and_mul(x, backend="cpu"),
            *rotary(heads, heads, None, heads[:, 0], backend="cpu"),
        )

    try:
        torch.set_num_threads(1)
        alone = everything()
        torch.set_num_threads(3)
        assert all(map(torch.equal, everything(), alone))
    finally:
        torch.set_num_threads(threads)
