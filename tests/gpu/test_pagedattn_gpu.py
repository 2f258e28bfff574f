"""The Triton back end on a device: the same cases as on the CPU, and what only a device can show."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "pagedattn"))
from pagedattn_reference import make_case, reference  # ty: ignore[import-not-found]

from pagedattn import attend, backend_name, rms_norm, rotary, triton_backend, write_kv
from pagedattn.backends import ScoreOptions

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
# float32 runs as three TF32 products; the others round weights and results to their type.
TOLERANCE = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MIXED = [(1, 1), (1, 700), (1, 16), (1, 17), (133, 133), (20, 361), (1, 1), (1, 50), (5, 5)]
SLOPES, SINKS = torch.tensor([0.5, 0.25, 0.1, 0.02]), torch.tensor([0.5, -1.0, 3.0, 0.0])
OPTIONS = {
    "plain": {},
    "window": {"window": 20},
    "soft cap": {"soft_cap": 2.0},
    "alibi": {"alibi_slopes": SLOPES},
    "sinks": {"sinks": SINKS},
    "all": {"window": 20, "soft_cap": 3.0, "alibi_slopes": SLOPES, "sinks": SINKS},
}


def on_device(options):
    return {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }


def assert_close(result, expected):
    assert torch.isfinite(result).all()
    difference = (result.double().cpu() - torch.from_numpy(expected)).abs().max().item()
    assert difference <= TOLERANCE[result.dtype]


def check(case, backend="triton", **options):
    result = attend(case.query, case.cache, case.batch, scale=0.2, backend=backend, **on_device(options))
    assert_close(result, reference(case, scale=0.2, **options))


def test_triton_is_the_default():
    assert backend_name(torch.device(DEVICE)) == "triton"


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_mixed_batch(backend, dtype, options):
    window = options.get("window", 0)
    check(make_case(MIXED, dtype=dtype, forget_before=window, device=DEVICE), backend, **options)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [32, 80, 96, 112, 128, 256])
def test_head_sizes(dtype, head_dim):
    check(make_case([(1, 40), (90, 130)], head_dim=head_dim, dtype=dtype, device=DEVICE))


@pytest.mark.parametrize("block_size", [8, 16, 24, 256])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 4), (9, 3), (40, 1)])
def test_block_sizes_and_groups(block_size, q_heads, kv_heads):
    sequences = [(1, 40), (1, 300), (30, 70)]
    check(make_case(sequences, block_size=block_size, q_heads=q_heads, kv_heads=kv_heads, device=DEVICE))


@pytest.mark.parametrize("splits", [2, 7, 64])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_split_decode(splits, options):
    window = options.get("window", 0)
    case = make_case([(1, 1), (1, 900), (1, 64)], forget_before=window, dtype=torch.float16, device=DEVICE)
    arguments = dict.fromkeys(ScoreOptions._fields) | {"scale": 0.2} | on_device(options)
    result = torch.full_like(case.query, torch.nan)
    triton_backend.attend_split(case.query, case.cache, case.batch, ScoreOptions(**arguments), result, splits)
    assert_close(result, reference(case, scale=0.2, **options))


def test_long_decodes_are_split_by_default():
    check(make_case([(1, 2500), (1, 1700)], kv_heads=1, dtype=torch.bfloat16, device=DEVICE))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_writes_equal_those_of_the_torch_back_end(dtype):
    fused = torch.randn(50, 5, 80, device=DEVICE).to(dtype)
    slots = torch.randperm(16 * 9, device=DEVICE)[:50]
    slots[::7] = -1
    caches = torch.zeros(2, 9, 2, 2, 16, 80, device=DEVICE, dtype=dtype)
    for cache, backend in zip(caches, ("triton", "torch")):
        write_kv(fused[:, :2], fused[:, 3:], cache, slots, backend=backend)
    assert torch.equal(caches[0], caches[1])


@pytest.mark.parametrize("sequences", [MIXED, [(1, 700), (1, 900)]], ids=["mixed", "decodes"])
def test_a_captured_graph_serves_other_contents_of_the_same_tensors(sequences):
    first = make_case(sequences, seed=1, device=DEVICE)
    other = make_case(sequences, seed=2, device=DEVICE)
    attend(first.query, first.cache, first.batch, scale=0.2)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = attend(first.query, first.cache, first.batch, scale=0.2)
    graph.replay()
    assert_close(result, reference(first, scale=0.2))
    first.query.copy_(other.query)
    first.cache.copy_(other.cache)
    first.batch.block_table.copy_(other.batch.block_table)
    graph.replay()
    assert_close(result, reference(other, scale=0.2))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=str)
def test_rms_norm_gives_what_it_gives_on_the_cpu(dtype, weight_dtype):
    x, residual = torch.randn(2, 9, 96).to(dtype)
    weight = torch.randn(96).to(weight_dtype or dtype)
    expected = rms_norm(x, weight, 1e-6, residual)
    results = rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-6, residual.to(DEVICE))
    for result, wanted in zip(results, expected):
        assert_close(result, wanted.double().numpy())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rotary_gives_what_it_gives_on_the_cpu(dtype):
    query, key = torch.randn(9, 4, 64).to(dtype), torch.randn(9, 2, 64).to(dtype)
    positions, cos_sin = torch.randperm(9), torch.randn(9, 48)
    expected = rotary(query, key, positions, cos_sin)
    results = rotary(query.to(DEVICE), key.to(DEVICE), positions.to(DEVICE), cos_sin.to(DEVICE))
    for result, wanted in zip(results, expected):
        assert_close(result, wanted.double().numpy())
