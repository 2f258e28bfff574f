"""Quantised weights: what they stand for, and products with them against float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cases import BACKENDS, BFLOAT, HALF, SINGLE, assert_product, numbers

from pagedattn import linear, pack_linear
from pagedattn.quantized import INT4_VALUES
from pairwise import parametrize_pairs

KINDS = ["int8", "int8-dynamic", "int4"]


def pack(weight, kind, backend="cpu", group=64):
    return pack_linear(
        weight, quantization=kind, group_size=group if kind == "int4" else None, backend=backend
    )


def rounded_rows(x, fused):
    """Rows of x as int8 times a scale, by numpy; without fused multiply-adds a quotient is rounded twice."""
    x = x.float().numpy()
    highest = np.abs(x).max(-1, keepdims=True, initial=0)
    factor = np.divide(np.float32(127), highest, where=highest > 0, out=np.zeros_like(highest))
    codes = np.rint(x.astype(np.float64) * factor if fused else x * factor)
    return torch.from_numpy(codes * (highest / np.float32(127)).astype(np.float64))


def assert_quantized_product(result, x, packed, bias=None):
    """The result is that of float64 over what the weight, and for int8-dynamic the rows, were rounded to."""
    weight = packed.unpack()
    if packed.quantization != "int8-dynamic":
        assert_product(result, x, weight, bias)
        return
    try:
        assert_product(result, rounded_rows(x, fused=True), weight, bias)
    except AssertionError:
        assert_product(result, rounded_rows(x, fused=False), weight, bias)


@parametrize_pairs(
    rows=[1, 2, 3, 6, 7, 12, 13, 70],
    inputs=[1, 4, 16, 67, 128, 300, 576],
    outputs=[1, 16, 31, 64, 130],
    dtype=[SINGLE, HALF, BFLOAT],
    weight_dtype=[SINGLE, HALF, BFLOAT, torch.float64],
    bias_dtype=[None, SINGLE, "x"],
    kind=KINDS,
    group=[32, 64, 128],
    num_threads=[1, 2],
    backend=BACKENDS,
)
def test_products_are_those_of_float64(
    rows, inputs, outputs, dtype, weight_dtype, bias_dtype, kind, group, num_threads, backend, threads
):
    threads(num_threads)
    x, weight = numbers(rows, inputs, dtype=dtype), numbers(outputs, inputs, dtype=weight_dtype, seed=1)
    bias = None
    if bias_dtype is not None:
        bias = numbers(outputs, dtype=dtype if bias_dtype == "x" else bias_dtype, seed=2)
    packed = pack(weight, kind, backend, group)
    result = linear(x, packed, bias, backend=backend)
    assert result.dtype == dtype
    assert_quantized_product(result, x, packed, bias)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 70),
    inputs=st.integers(0, 300),
    outputs=st.integers(0, 100),
    gap=st.integers(0, 5),
    dtype=st.sampled_from([SINGLE, HALF, BFLOAT]),
    kind=st.sampled_from(KINDS),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_slices_of_wider_rows(rows, inputs, outputs, gap, dtype, kind, with_bias, seed):
    x = numbers(rows, inputs + gap, dtype=dtype, seed=seed)[:, gap:]
    bias = numbers(outputs, dtype=dtype, seed=seed + 2) if with_bias else None
    packed = pack(numbers(outputs, inputs, seed=seed + 1), kind)
    wide = torch.full((rows, outputs + 2 * gap), 7.0, dtype=dtype)
    out = wide[:, gap : gap + outputs]
    assert linear(x, packed, bias, out=out, backend="cpu") is out
    assert_quantized_product(out, x, packed, bias)
    assert (wide[:, :gap] == 7).all()
    assert (wide[:, gap + outputs :] == 7).all()


@parametrize_pairs(kind=KINDS, dtype=[SINGLE, BFLOAT], inputs=[64, 147])
def test_a_row_has_the_same_bits_in_every_batch_and_on_any_threads(kind, dtype, inputs, threads):
    x = numbers(100, inputs, dtype=dtype)
    packed, bias = pack(numbers(97, inputs, seed=1), kind), numbers(97, seed=2)
    threads(1)
    alone = torch.cat([linear(row[None], packed, bias, backend="cpu") for row in x])
    for num_threads in (1, 2, 3):
        threads(num_threads)
        for count in (2, 3, 5, 6, 7, 11, 12, 13, 25, 95, 100):
            assert torch.equal(linear(x[:count], packed, bias, backend="cpu"), alone[:count])
            assert torch.equal(linear(x[-count:], packed, bias, backend="cpu"), alone[-count:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (32, 8), (75, 133)])
def test_a_weight_is_rounded_by_half_a_step(shape, kind, backend):
    weight = numbers(*shape)
    packed = pack(weight, kind, backend)
    assert (packed.shape, packed.device) == (shape, weight.device)
    plain = packed.unpack()
    for row, rounded in zip(weight, plain):
        for group in range(0, shape[1], 64) if kind == "int4" else [0]:
            part = slice(group, group + 64 if kind == "int4" else None)
            highest = row[part].abs().max()
            # The widest gap of int4's values is 26 of 127, and the end opposite to its extreme is at 112.
            allowed = highest * 0.17 if kind == "int4" else highest / 127 * 0.501
            assert (row[part] - rounded[part]).abs().max() <= allowed
    ids = torch.tensor([[0, shape[0] - 1], [shape[0] // 2, 0]])
    assert torch.equal(packed.rows(ids), plain[ids])
    assert torch.equal(plain, pack(weight, kind, "torch").unpack())


@pytest.mark.parametrize("kind", KINDS)
def test_codes_that_the_weight_is_made_of_come_back(kind):
    values = torch.tensor(INT4_VALUES if kind == "int4" else range(-127, 128))
    codes = values[torch.randint(len(values), (40, 200), generator=torch.Generator().manual_seed(0))]
    codes[:, ::64] = -127  # the extreme of each group
    packed = pack(codes * 0.25, kind)
    assert torch.equal(packed.codes().codes, codes)
    assert torch.equal(packed.unpack(), codes * 0.25)
    x = torch.randint(-127, 128, (20, 200), generator=torch.Generator().manual_seed(1)).float()
    x[:, 3] = 127
    assert torch.equal(linear(x, packed, backend="cpu"), x @ (codes * 0.25).T)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_has_less_error_than_16_even_steps(group, size):
    """Than the best of some even spacings, over normal values; a level of zero costs nothing."""
    weight = numbers(64, 256) * size
    weight[:, 5] = 0
    rounded = pack(weight, "int4", group=group).unpack()
    assert (rounded[:, 5] == 0).all()
    grouped = weight.double().unflatten(1, (-1, group)) / size
    extreme = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))
    even = torch.full(extreme.shape, torch.inf, dtype=torch.float64)
    for end in (-8.5, -8.0, -7.5, 7.0):
        step = extreme / end
        error = ((grouped / step).round().clamp(-8, 7) * step - grouped).square().sum(-1, keepdim=True)
        even = torch.minimum(even, error)
    own = (rounded.double() / size - weight.double() / size).square().sum()
    assert own < 0.9 * even.sum()


def test_memory_of_a_quantized_weight():
    weight = numbers(128, 1024)
    assert pack(weight, "int8").nbytes == 128 * (1024 + 4)
    assert pack(weight, "int8-dynamic").nbytes == 128 * (1024 + 8)
    assert pack(weight, "int4", group=128).nbytes == 128 * (512 + 8 * 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_tiny_rows(kind, backend):
    weight = numbers(40, 70)
    weight[7] = 0
    x = numbers(14, 70, seed=1)
    x[3], x[4] = 0, 1e-38
    result = linear(x, pack(weight, kind, backend), backend=backend)
    assert torch.equal(result[:, 7], torch.zeros(14))
    assert torch.equal(result[3], torch.zeros(40))
    assert result[4].abs().max() < 1e-35


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_stays_in_its_row(value, backend):
    x = torch.ones(14, 20)
    x[3, 7] = value
    for kind in KINDS:
        result = linear(x, pack(torch.ones(40, 20), kind, backend), backend=backend)
        expected = torch.full((14, 40), 20.0)
        expected[3] = torch.nan if kind == "int8-dynamic" else value
        assert torch.allclose(result, expected, rtol=0.01, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_shapes_of_no_elements(kind, backend):
    packed = pack(torch.ones(5, 8), kind, backend)
    assert linear(torch.ones(0, 8), packed, backend=backend).shape == (0, 5)
    no_inputs, bias = pack(torch.ones(5, 0), kind, backend), torch.arange(5.0)
    assert torch.equal(linear(torch.ones(1, 0), no_inputs, bias, backend=backend), bias[None])
    no_outputs = pack(torch.ones(0, 8), kind, backend)
    assert linear(torch.ones(3, 8), no_outputs, backend=backend).shape == (3, 0)


def test_weights_packed_for_another_back_end():
    x, weight = numbers(4, 24), numbers(33, 24, seed=1)
    for kind in KINDS:
        for packer, multiplier in (("torch", "cpu"), ("cpu", "torch")):
            packed = pack(weight, kind, packer)
            assert_quantized_product(linear(x, packed, backend=multiplier), x, packed)


def test_what_does_not_fit_is_refused(monkeypatch):
    weight = torch.ones(5, 8)
    with pytest.raises(ValueError, match=r"not 'int3'"):
        pack_linear(weight, quantization="int3")
    with pytest.raises(ValueError, match=r"group_size is one of \(32, 64, 128\), not 48"):
        pack_linear(weight, quantization="int4", group_size=48)
    with pytest.raises(ValueError, match=r"int8 has a scale for each output, not for groups of 64"):
        pack_linear(weight, quantization="int8", group_size=64)
    with pytest.raises(ValueError, match=r"group_size 64 goes with quantization='int4'"):
        pack_linear(weight, group_size=64)
    with pytest.raises(ValueError, match=r"stored as torch\.bfloat16 or quantised to int8, not both"):
        pack_linear(weight, BFLOAT, quantization="int8")
    with pytest.raises(ValueError, match=r"sums up to 131072 inputs, not 131073"):
        pack_linear(torch.ones(1, 131_073), quantization="int8-dynamic")
    with pytest.raises(ValueError, match="not finite"):
        pack_linear(torch.tensor([[1.0, torch.inf]]), quantization="int4")
    with pytest.raises(ValueError, match=r"torch\.float32 has no codes"):
        pack_linear(weight).codes()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="triton back end has no weights of int8"):
        pack_linear(weight, quantization="int8", backend="triton")
