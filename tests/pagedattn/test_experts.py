"""The operations of a mixture of experts, against float64 and against themselves in other batches."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cases import BACKENDS, BFLOAT, HALF, SINGLE, assert_product, numbers

from pagedattn import (
    build_batch,
    capture,
    group_by_expert,
    grouped_linear,
    linear,
    pack_experts,
    pack_linear,
    silu_and_mul,
    top_k_softmax,
    weighted_sum,
)
from pairwise import parametrize_pairs

KINDS = ["int8", "int8-dynamic", "int4"]


def sizes_of(rows, experts, seed):
    """How many rows each expert gets: most of them none where there are many experts."""
    chosen = np.random.default_rng(seed).integers(0, experts, 3)[np.arange(rows) % 3]
    return np.bincount(chosen, minlength=experts)


def starts_of(sizes):
    return torch.tensor(np.concatenate([[0], np.cumsum(sizes)]), dtype=torch.int32)


@parametrize_pairs(
    rows=[1, 2, 7, 40, 130],
    experts=[1, 5, 64],
    inputs=[1, 16, 67, 160],
    outputs=[1, 31, 64, 130],
    dtype=[SINGLE, HALF, BFLOAT],
    weight_dtype=[SINGLE, HALF, BFLOAT],
    indexed=[False, True],
    num_threads=[1, 2, 3],
    backend=BACKENDS,
)
def test_products_are_those_of_float64(
    rows, experts, inputs, outputs, dtype, weight_dtype, indexed, num_threads, backend, threads
):
    threads(num_threads)
    x = numbers(rows, inputs, dtype=dtype)
    weight = numbers(experts, outputs, inputs, dtype=weight_dtype, seed=1)
    sizes = sizes_of(rows, experts, rows + experts)
    index = torch.from_numpy(np.random.default_rng(2).integers(0, rows, rows)).int() if indexed else None
    packed = pack_experts(weight, backend=backend)
    result = grouped_linear(x, packed, starts_of(sizes), index, backend=backend)
    assert (result.dtype, result.shape) == (dtype, (rows, outputs))
    taken = x if index is None else x[index.long()]
    for expert, (some, part) in enumerate(zip(taken.split(sizes.tolist()), result.split(sizes.tolist()))):
        assert_product(part, some, weight[expert])


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=9),
    inputs=st.integers(1, 150),
    outputs=st.integers(1, 100),
    gap=st.integers(0, 5),
    dtype=st.sampled_from([SINGLE, HALF, BFLOAT]),
    weight_dtype=st.sampled_from([SINGLE, HALF, BFLOAT]),
    seed=st.integers(0, 1000),
)
def test_a_row_has_the_bits_of_the_dense_product(sizes, inputs, outputs, gap, dtype, weight_dtype, seed):
    rows = sum(sizes)
    x = numbers(rows + 1, inputs + gap, dtype=dtype, seed=seed)[:, gap:]
    weight = numbers(len(sizes), outputs, inputs, dtype=weight_dtype, seed=seed + 1)
    index = torch.from_numpy(np.random.default_rng(seed).integers(0, rows + 1, rows)).int()
    wide = torch.full((rows, outputs + 2 * gap), 7.0, dtype=dtype)
    out = wide[:, gap : gap + outputs]
    packed = pack_experts(weight, backend="cpu")
    assert grouped_linear(x, packed, starts_of(sizes), index, out=out, backend="cpu") is out
    taken = x[index.long()].split(sizes)
    dense = [
        linear(part, pack_linear(one, backend="cpu"), backend="cpu")
        for part, one in zip(taken, weight, strict=True)
    ]
    assert torch.equal(out, torch.cat(dense))
    assert (wide[:, :gap] == 7).all()
    assert (wide[:, gap + outputs :] == 7).all()


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=6),
    inputs=st.integers(1, 150),
    outputs=st.integers(1, 100),
    dtype=st.sampled_from([SINGLE, HALF, BFLOAT]),
    kind=st.sampled_from(KINDS),
    backend=st.sampled_from(BACKENDS),
    seed=st.integers(0, 1000),
)
def test_quantised_experts_have_the_bits_of_quantised_dense_products(
    sizes, inputs, outputs, dtype, kind, backend, seed
):
    rows = sum(sizes)
    x = numbers(rows + 1, inputs, dtype=dtype, seed=seed)
    weight = numbers(len(sizes), outputs, inputs, seed=seed + 1)
    index = torch.from_numpy(np.random.default_rng(seed).integers(0, rows + 1, rows)).int()
    packed = pack_experts(weight, quantization=kind, backend=backend)
    dense = [pack_linear(one, quantization=kind, backend=backend) for one in weight]
    assert (packed.quantization, packed.shape) == (kind, tuple(weight.shape))
    assert packed.nbytes == sum(one.nbytes for one in dense)
    assert torch.equal(packed.unpack(), torch.stack([one.unpack() for one in dense]))
    result = grouped_linear(x, packed, starts_of(sizes), index, backend=backend)
    parts = zip(x[index.long()].split(sizes), dense, strict=True)
    assert torch.equal(result, torch.cat([linear(part, one, backend=backend) for part, one in parts]))


@pytest.mark.parametrize("kind", KINDS)
def test_back_ends_agree_on_quantised_experts(kind):
    sizes = [0, 5, 1, 0, 14]
    x, weight = numbers(20, 70), numbers(5, 33, 70, seed=1)
    found = [
        grouped_linear(
            x, pack_experts(weight, quantization=kind, backend=name), starts_of(sizes), backend=name
        )
        for name in BACKENDS
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [SINGLE, BFLOAT], ids=str)
def test_any_number_of_threads_gives_the_same_bits(dtype, threads):
    sizes = [0, 1, 60, 2, 0, 131]
    x, weight = numbers(sum(sizes), 147, dtype=dtype), numbers(6, 97, 147, dtype=BFLOAT, seed=1)
    packed, found = pack_experts(weight, backend="cpu"), []
    for num_threads in (1, 2, 3):
        threads(num_threads)
        found.append(grouped_linear(x, packed, starts_of(sizes), backend="cpu"))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [SINGLE, HALF, BFLOAT], ids=str)
@pytest.mark.parametrize("stored", [None, BFLOAT])
def test_unpacked_weights_are_the_ones_that_were_packed(dtype, stored, backend):
    weight = numbers(3, 33, 17, dtype=dtype)
    packed = pack_experts(weight, stored, backend=backend)
    assert packed.shape == (3, 33, 17)
    assert packed.dtype == (stored or dtype)
    assert torch.equal(packed.unpack(), weight.to(stored or dtype))


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.integers(0, 40),
    experts=st.integers(1, 70),
    share=st.floats(0, 1),
    normalise=st.booleans(),
    dtype=st.sampled_from([SINGLE, HALF, BFLOAT, torch.float64]),
    backend=st.sampled_from(BACKENDS),
    seed=st.integers(0, 1000),
)
def test_the_likeliest_experts(tokens, experts, share, normalise, dtype, backend, seed):
    k = 1 + round(share * (experts - 1))
    logits = (3 * numbers(tokens, experts + 2, seed=seed)).to(dtype)[:, 1:-1]
    found = top_k_softmax(logits, k, normalise=normalise, backend=backend)
    assert (found.weights.dtype, found.experts.dtype) == (SINGLE, torch.int32)
    assert found.weights.shape == found.experts.shape == (tokens, k)
    wide = logits.double().numpy()
    exact = np.exp(wide - wide.max(-1, keepdims=True))
    exact /= exact.sum(-1, keepdims=True)
    chosen = found.experts.numpy()
    taken = np.take_along_axis(wide, chosen, -1)
    np.testing.assert_array_equal(taken, -np.sort(-wide, axis=-1)[:, :k])
    assert all(len(set(row)) == k for row in chosen.tolist())
    weights = np.take_along_axis(exact, chosen, -1)
    if normalise:
        weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(found.weights.numpy(), weights, rtol=3e-6, atol=1e-37)


@pytest.mark.parametrize("threads_used", [1, 3])
def test_equal_logits_go_to_the_first_experts(threads_used, threads):
    threads(threads_used)
    logits = torch.tensor([0.0, 2, 1, 2, 0, 2, -torch.inf]).repeat(5000, 1)
    found = top_k_softmax(logits, 7, normalise=False, backend="cpu")
    assert (found.experts == torch.tensor([1, 3, 5, 2, 0, 4, 6])).all()
    assert (found.weights[:, 6] == 0).all()


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_that_is_not_a_number_spoils_no_other(normalise, backend):
    logits = numbers(4, 6)
    expected = top_k_softmax(logits, 3, normalise=normalise, backend=backend)
    spoiled = logits.clone()
    spoiled[1, 4], spoiled[2] = torch.nan, torch.nan
    found = top_k_softmax(spoiled, 3, normalise=normalise, backend=backend)
    assert found.weights[1:3].isnan().all()
    assert 4 not in found.experts[1]
    assert all(sorted(set(row)) == sorted(row) for row in found.experts.tolist())
    assert 0 <= int(found.experts.min()) <= int(found.experts.max()) < 6
    for kept in (0, 3):
        assert torch.equal(found.weights[kept], expected.weights[kept])
        assert torch.equal(found.experts[kept], expected.experts[kept])


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.integers(0, 60),
    k=st.integers(1, 5),
    experts=st.integers(1, 40),
    backend=st.sampled_from(BACKENDS),
    seed=st.integers(0, 1000),
)
def test_rows_are_sorted_by_expert_and_then_by_token(tokens, k, experts, backend, seed):
    chosen = np.random.default_rng(seed).integers(0, experts, (tokens, k)).astype(np.int32)
    loads = torch.full((experts,), 2)
    found = group_by_expert(torch.from_numpy(chosen), experts, loads=loads, backend=backend)
    rows = sorted((expert, choice) for choice, expert in enumerate(chosen.flatten().tolist()))
    counts = np.bincount(chosen.flatten(), minlength=experts)
    assert found.starts.tolist() == starts_of(counts).tolist()
    assert found.index.tolist() == [choice // k for _, choice in rows]
    places = {choice: row for row, (_, choice) in enumerate(rows)}
    assert found.places.flatten().tolist() == [places[choice] for choice in range(tokens * k)]
    assert {part.dtype for part in found} == {torch.int32}
    assert loads.tolist() == (counts + 2).tolist()


@parametrize_pairs(
    tokens=[0, 1, 9, 700],
    k=[1, 2, 5],
    width=[1, 16, 67, 130],
    dtype=[SINGLE, HALF, BFLOAT, torch.float64],
    num_threads=[1, 3],
    backend=BACKENDS,
)
def test_sums_are_those_of_float64(tokens, k, width, dtype, num_threads, backend, threads):
    threads(num_threads)
    results = numbers(tokens * k, width + 3).to(dtype)[:, 3:]
    weights = numbers(tokens, k, seed=1).abs()
    places = torch.randperm(tokens * k).view(tokens, k).int()
    wide = torch.full((tokens, width + 2), 7.0, dtype=dtype)
    out = weighted_sum(results, places, weights, out=wide[:, 1:-1], backend=backend)
    assert out.data_ptr() == wide[:, 1:].data_ptr()
    terms = results.double().numpy()[places.numpy()] * weights.double().numpy()[..., None]
    exact, info = terms.sum(1), torch.finfo(dtype)
    rounding = np.maximum(np.abs(exact), info.tiny) * info.eps / 2
    allowed = (k + 1) * 2.0**-24 * np.abs(terms).sum(1) + rounding
    assert (np.abs(out.double().numpy() - exact) <= allowed).all()
    assert (wide[:, 0] == 7).all()
    assert (wide[:, -1] == 7).all()
    assert torch.equal(weighted_sum(results, places, weights, backend=backend), out)


def mixture(backend=None, *, experts=6, k=2, hidden=32, inner=24, kind=None):
    """A gate, experts and the sum of their results, with loads: what a layer has of these operations."""
    gate = pack_linear(numbers(experts, hidden), backend=backend)
    up = pack_experts(numbers(experts, 2 * inner, hidden, seed=1) / 4, quantization=kind, backend=backend)
    down = pack_experts(numbers(experts, hidden, inner, seed=2) / 4, quantization=kind, backend=backend)
    loads = torch.zeros(experts, dtype=torch.int64)

    def run(inputs, batch=None):
        (x,) = inputs
        logits = linear(x, gate, backend=backend)
        routing = top_k_softmax(logits, k, normalise=True, backend=backend)
        groups = group_by_expert(routing.experts, experts, loads=loads, backend=backend)
        wide = grouped_linear(x, up, groups.starts, groups.index, backend=backend)
        results = grouped_linear(silu_and_mul(wide, backend=backend), down, groups.starts, backend=backend)
        return (weighted_sum(results, groups.places, routing.weights, backend=backend),)

    return run, loads


def test_back_ends_agree_on_a_mixture():
    x = numbers(50, 32, seed=3)
    found = []
    for backend in BACKENDS:
        run, loads = mixture(backend)
        found.append((run((x,))[0], loads))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
    assert torch.equal(found[0][1], found[1][1])


@parametrize_pairs(dtype=[SINGLE, BFLOAT], kind=[None, *KINDS])
def test_a_mixture_is_recorded(dtype, kind):
    run, loads = mixture(kind=kind)
    program = capture(run, lambda n: (torch.zeros(n, 32, dtype=dtype),), block_size=4, max_tokens=80)
    assert (program.num_operations, program.num_host_calls) == (7, 0)
    for tokens in (80, 1, 2, 33):
        x = numbers(tokens, 32, dtype=dtype, seed=tokens)
        loads.zero_()
        (expected,) = run((x,))
        counted = loads.clone()
        assert counted.sum() == 2 * tokens
        loads.zero_()
        assert torch.equal(
            program((x,), build_batch([tokens], [tokens], [list(range(20))], block_size=4))[0], expected
        )
        assert torch.equal(loads, counted)


def test_what_does_not_fit_is_refused():
    x, packed = torch.zeros(5, 8), pack_experts(torch.zeros(3, 6, 8))
    starts, experts = torch.zeros(4, dtype=torch.int32), torch.zeros(5, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"x must be \[rows, 8\] .*, not torch.float32 \[5, 7\]"):
        grouped_linear(x[:, 1:], packed, starts)
    with pytest.raises(ValueError, match=r"starts must be int32 \[4\] for 3 experts, not torch.int32 \[3\]"):
        grouped_linear(x, packed, starts[1:])
    with pytest.raises(ValueError, match=r"index must be int32 \[rows\], not torch.int64 \[4\]"):
        grouped_linear(x, packed, starts, starts.long())
    with pytest.raises(ValueError, match=r"out must be \[5, 6\] .*, not \[5, 8\] torch.float32"):
        grouped_linear(x, packed, starts, out=x)
    with pytest.raises(ValueError, match=r"weight must be \[experts, outputs, inputs\], not \[5, 8\]"):
        pack_experts(x)
    with pytest.raises(ValueError, match=r"are float32, float16 or bfloat16, not torch\.float64"):
        pack_experts(torch.zeros(3, 6, 8), torch.float64)
    with pytest.raises(ValueError, match=r"not 'int3'"):
        pack_experts(torch.zeros(3, 6, 8), quantization="int3")
    with pytest.raises(ValueError, match="there are no experts to quantise"):
        pack_experts(torch.zeros(0, 6, 8), quantization="int8")
    with pytest.raises(ValueError, match="k must be between 1 and the 8 experts, not 9"):
        top_k_softmax(x, 9, normalise=False)
    with pytest.raises(ValueError, match=r"experts must be int32 \[tokens, k\] .*, not torch.int64 \[5, 2\]"):
        group_by_expert(experts.long(), 3)
    with pytest.raises(ValueError, match=r"loads must be contiguous int64 \[3\] on cpu"):
        group_by_expert(experts, 3, loads=torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"weights must be float32 \[5, 2\], not torch.float32 \[5, 8\]"):
        weighted_sum(x, experts, x)
