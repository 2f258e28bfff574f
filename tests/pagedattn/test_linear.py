"""Linear layers over packed weights, against float64 and against themselves in other batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cases import BACKENDS, BFLOAT, HALF, SINGLE, assert_product, numbers

from pagedattn import linear, pack_linear
from pairwise import parametrize_pairs


@parametrize_pairs(
    rows=[1, 2, 5, 12, 13, 25, 97, 200],
    inputs=[1, 16, 67, 576],
    outputs=[1, 16, 31, 64, 130],
    dtype=[SINGLE, HALF, BFLOAT],
    weight_dtype=[SINGLE, HALF, BFLOAT],
    bias_dtype=[None, SINGLE, "x"],
    num_threads=[1, 2, 3],
    backend=BACKENDS,
)
def test_products_are_those_of_float64(
    rows, inputs, outputs, dtype, weight_dtype, bias_dtype, num_threads, backend, threads
):
    threads(num_threads)
    x, weight = numbers(rows, inputs, dtype=dtype), numbers(outputs, inputs, dtype=weight_dtype, seed=1)
    bias = None
    if bias_dtype is not None:
        bias = numbers(outputs, dtype=dtype if bias_dtype == "x" else bias_dtype, seed=2)
    packed = pack_linear(weight, backend=backend)
    result = linear(x, packed, bias, backend=backend)
    assert result.dtype == dtype
    assert_product(result, x, weight, bias)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 70),
    inputs=st.integers(0, 300),
    outputs=st.integers(0, 100),
    gap=st.integers(0, 5),
    dtype=st.sampled_from([SINGLE, HALF, BFLOAT]),
    weight_dtype=st.sampled_from([SINGLE, HALF, BFLOAT]),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_slices_of_wider_rows(rows, inputs, outputs, gap, dtype, weight_dtype, with_bias, seed):
    x = numbers(rows, inputs + gap, dtype=dtype, seed=seed)[:, gap:]
    weight = numbers(outputs, inputs, dtype=weight_dtype, seed=seed + 1)
    bias = numbers(outputs, dtype=dtype, seed=seed + 2) if with_bias else None
    wide = torch.full((rows, outputs + 2 * gap), 7.0, dtype=dtype)
    out = wide[:, gap : gap + outputs]
    assert linear(x, pack_linear(weight, backend="cpu"), bias, out=out, backend="cpu") is out
    assert_product(out, x, weight, bias)
    assert (wide[:, :gap] == 7).all()
    assert (wide[:, gap + outputs :] == 7).all()


@parametrize_pairs(weight_dtype=[SINGLE, HALF, BFLOAT], dtype=[SINGLE, HALF, BFLOAT], inputs=[64, 147])
def test_a_row_has_the_same_bits_in_every_batch_and_on_any_threads(weight_dtype, dtype, inputs, threads):
    rows = 12 * 8 * 2 + 30  # more than two blocks of tiles, and enough work for several threads
    x = numbers(rows, inputs, dtype=dtype)
    packed = pack_linear(numbers(97, inputs, seed=1), weight_dtype, backend="cpu")
    bias = numbers(97, seed=2)
    threads(1)
    alone = torch.cat([linear(row[None], packed, bias, backend="cpu") for row in x])
    for num_threads in (1, 2, 3):
        threads(num_threads)
        for count in (2, 3, 5, 6, 7, 11, 12, 13, 24, 25, 95, 96, 97, rows):
            assert torch.equal(linear(x[:count], packed, bias, backend="cpu"), alone[:count])
            assert torch.equal(linear(x[-count:], packed, bias, backend="cpu"), alone[-count:])


@pytest.mark.parametrize("inputs", [100, 101])
@pytest.mark.parametrize("weight_dtype", [HALF, BFLOAT], ids=str)
def test_weights_of_16_bits_give_the_bits_of_the_same_weights_in_float32(weight_dtype, inputs):
    x, weight = numbers(30, inputs), numbers(70, inputs, dtype=weight_dtype, seed=1)
    narrow, wide = pack_linear(weight, backend="cpu"), pack_linear(weight, SINGLE, backend="cpu")
    assert torch.equal(linear(x, narrow, backend="cpu"), linear(x, wide, backend="cpu"))
    assert narrow.nbytes <= wide.nbytes * 102 // 202  # bfloat16 words hold an even number of inputs


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weight_dtype", [SINGLE, HALF, BFLOAT], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_stay_in_their_rows_and_columns(value, weight_dtype, backend):
    x, weight = torch.ones(14, 20), torch.ones(40, 20, dtype=weight_dtype)
    x[3, 7] = value
    weight[33, 2] = value
    result = linear(x, pack_linear(weight, backend=backend), backend=backend)
    expected = torch.full((14, 40), 20.0)
    expected[3] = expected[:, 33] = value
    assert torch.equal(result.nan_to_num(nan=-5.0), expected.nan_to_num(nan=-5.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_of_no_elements(backend):
    packed = pack_linear(torch.ones(5, 8), backend=backend)
    assert linear(torch.ones(0, 8), packed, backend=backend).shape == (0, 5)
    assert linear(torch.ones(2, 0, 8), packed, backend=backend).shape == (2, 0, 5)
    no_inputs, bias = pack_linear(torch.ones(5, 0), backend=backend), torch.arange(5.0)
    assert torch.equal(linear(torch.ones(1, 0), no_inputs, bias, backend=backend), bias[None])
    no_outputs = pack_linear(torch.ones(0, 8), backend=backend)
    assert linear(torch.ones(3, 8), no_outputs, backend=backend).shape == (3, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_any_shape_and_layout(backend):
    weight = numbers(33, 24, seed=1)
    packed = pack_linear(weight, backend=backend)
    x = numbers(4, 6, 24)
    views = [x, x[1], x[1, 2], x.transpose(0, 1), x[::2, 1:4], numbers(24, 5).T, x[:1, :1].expand(4, 6, 24)]
    for view in views:
        result = linear(view, packed, backend=backend)
        assert result.shape == (*view.shape[:-1], 33)
        assert_product(result.view(-1, 33), view.reshape(-1, 24), weight)
        gaps = torch.zeros(*result.shape, 2)[..., 0]  # no dimension of it is contiguous
        assert torch.equal(linear(view, packed, out=gaps, backend=backend), result)
        assert torch.equal(gaps, result)


@pytest.mark.parametrize("dtype", [SINGLE, HALF, BFLOAT, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (32, 8), (75, 33)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_packed_weight_gives_itself_back(shape, dtype, backend):
    weight = numbers(*shape, dtype=dtype)
    packed = pack_linear(weight, backend=backend)
    assert (packed.shape, packed.dtype, packed.device) == (shape, dtype, weight.device)
    assert packed.nbytes >= weight.nbytes
    assert torch.equal(packed.unpack(), weight)
    ids = torch.tensor([[0, shape[0] - 1], [shape[0] // 2, 0]])
    assert torch.equal(packed.rows(ids), weight[ids])
    assert packed.rows(ids[:0]).shape == (0, 2, shape[1])


def test_weights_share_their_memory_with_no_other():
    weights = [numbers(40, 31, dtype=dtype, seed=seed) for seed in range(4) for dtype in (SINGLE, HALF)]
    packed = [pack_linear(weight, backend="cpu") for weight in weights]
    kept, packed = packed[::2], None
    for weight, one in zip(weights[::2], kept):
        assert torch.equal(one.unpack(), weight)


def test_rows_of_other_dtypes_and_weights_packed_for_another_back_end():
    weight = numbers(33, 24, seed=1)
    x = numbers(4, 24)
    for packer, multiplier in (("torch", "cpu"), ("cpu", "torch")):
        result = linear(x, pack_linear(weight, backend=packer), backend=multiplier)
        assert_product(result, x, weight)
    wide = linear(x.double(), pack_linear(weight, backend="cpu"), backend="cpu")
    assert (wide - x.double() @ weight.double().T).abs().max() < 1e-13


def test_what_does_not_fit_is_refused():
    packed, x = pack_linear(torch.ones(5, 8)), torch.ones(3, 8)
    with pytest.raises(ValueError, match=r"weight must be \[outputs, inputs\], not \[8\]"):
        pack_linear(torch.ones(8))
    with pytest.raises(ValueError, match=r"not torch\.int8"):
        pack_linear(torch.ones(5, 8, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"not torch\.float8_e4m3fn"):
        pack_linear(torch.ones(5, 8), torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"x must be \[\.\.\., 8\], not \[3, 7\]"):
        linear(x[:, 1:], packed)
    with pytest.raises(ValueError, match=r"x must be \[\.\.\., 8\], not \[\]"):
        linear(torch.tensor(1.0), packed)
    with pytest.raises(ValueError, match=r"x is torch\.int64 on cpu"):
        linear(x.long(), packed)
    with pytest.raises(ValueError, match=r"x is torch\.float32 on meta, the weight torch\.float32 on cpu"):
        linear(x.to("meta"), packed)
    with pytest.raises(ValueError, match=r"bias must be \[5\] on cpu, not \[1\]"):
        linear(x, packed, torch.ones(1))
    with pytest.raises(ValueError, match=r"torch\.float32, not torch\.float64"):
        linear(x, packed, torch.ones(5).double())
    with pytest.raises(ValueError, match=r"out must be \[3, 5\] torch\.float32 on cpu, not \[5\]"):
        linear(x, packed, out=torch.ones(5))
    with pytest.raises(ValueError, match=r"not \[3, 5\] torch\.float16"):
        linear(x, packed, out=torch.ones(3, 5).half())
    for ids in ([5], [-1]):
        with pytest.raises(IndexError, match=r"ids must be in \[0, 5\)"):
            packed.rows(torch.tensor(ids))
