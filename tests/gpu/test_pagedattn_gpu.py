"""The Triton back end on a device: the same cases as on the CPU, and what only a device can show."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "pagedattn"))
import triton
import triton.language as tl
from attention_cases import FEATURES, MIXED, make_features  # ty: ignore[import-not-found]
from pagedattn_reference import make_case, reference  # ty: ignore[import-not-found]

from pagedattn import attend, backend_name, rms_norm, rotary, write_kv
from pagedattn.backends import ScoreOptions
from pagedattn.triton_backend.attention import attend_by_plan, describe_device
from pagedattn.triton_backend.fp8 import round_to_fp8, widen_fp8
from pagedattn.triton_backend.plan import make_plan, share_prefix
from pairwise import parametrize_pairs

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
FP8 = torch.float8_e4m3fn
# float32 runs as three TF32 products; the others round weights and results to their type.
TOLERANCE = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def on_host(options):
    return {
        name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in options.items()
    }


def assert_close(result, expected):
    assert torch.isfinite(result).all()
    difference = (result.double().cpu() - torch.from_numpy(expected)).abs().max().item()
    assert difference <= TOLERANCE[result.dtype]


def check(case):
    result = attend(case.query, case.cache, case.batch, scale=0.2)
    assert_close(result, reference(case, scale=0.2))


def check_plan(case, plan, options):
    arguments = dict.fromkeys(ScoreOptions._fields) | {"scale": 0.2, "kv_scales": case.kv_scales}
    result = torch.full_like(case.query, torch.nan)
    attend_by_plan(case.query, case.cache, case.batch, ScoreOptions(**arguments | options), result, plan)
    assert_close(result, reference(case, scale=0.2, **on_host(options)))


def plan_of(case, window=None):
    device = describe_device(case.query.device)
    return make_plan(case.query, case.cache, case.batch, window, device)


def prefix_plan_of(case):
    device = describe_device(case.query.device)
    return share_prefix(plan_of(case), case.query, case.cache, case.batch, device)


def test_triton_is_the_default():
    assert backend_name(torch.device(DEVICE)) == "triton"


@parametrize_pairs(
    **FEATURES,
    head_dim=[32, 64, 80, 96, 112, 128, 256],
    block_size=[8, 16, 24, 256],
    heads=[(4, 2), (4, 4), (9, 3), (40, 1)],
    backend=["triton", "torch"],
)
def test_every_two_features(
    sequences, dtype, fp8, window, soft_cap, alibi, sinks, head_dim, block_size, heads, backend
):
    sizes = {"head_dim": head_dim, "block_size": block_size, "heads": heads, "device": DEVICE}
    case, options = make_features(sequences, dtype, fp8, window, soft_cap, alibi, sinks, **sizes)
    result = attend(
        case.query,
        case.cache,
        case.batch,
        scale=0.2,
        kv_scales=case.kv_scales,
        backend=backend,
        **options,
    )
    assert_close(result, reference(case, scale=0.2, **on_host(options)))


@parametrize_pairs(
    **FEATURES | {"sequences": [[(1, 1), (1, 900), (1, 64)], [(1, 900), (1, 64), (30, 70)]]},
    splits=[2, 7, 64],
)
def test_split_contexts(sequences, dtype, fp8, window, soft_cap, alibi, sinks, splits):
    sizes = {"head_dim": 64, "block_size": 16, "heads": (4, 2), "device": DEVICE}
    case, options = make_features(sequences, dtype, fp8, window, soft_cap, alibi, sinks, **sizes)
    check_plan(case, plan_of(case, window)._replace(splits=splits, min_piece=16), options)


@parametrize_pairs(
    **FEATURES | {"sequences": ["one prefix"], "window": [None]}, pieces=[(1, 1), (5, 1), (3, 4)]
)
def test_cascade(sequences, dtype, fp8, window, soft_cap, alibi, sinks, pieces):
    sizes = {"head_dim": 64, "block_size": 16, "heads": (4, 2), "device": DEVICE}
    case, options = make_features(sequences, dtype, fp8, window, soft_cap, alibi, sinks, **sizes)
    plan = prefix_plan_of(case)._replace(prefix_splits=pieces[0], splits=pieces[1], min_piece=16)
    check_plan(case, plan, options)


def test_a_long_shared_prefix_is_read_once_by_default():
    case = make_case(
        [(1, 1025 + n) for n in range(64)], shared_prefix=1024, dtype=torch.bfloat16, device=DEVICE
    )
    assert plan_of(case).prefix is not None
    check(case)


def test_long_decodes_are_split_by_default():
    for sequences in ([(1, 2500), (1, 1700)], [(1, 2500), (40, 90)]):
        case = make_case(sequences, kv_heads=1, dtype=torch.bfloat16, device=DEVICE)
        assert plan_of(case).splits > 1
        check(case)


@triton.jit
def convert_kernel(codes, integer, hardware, rounded, SIZE: tl.constexpr, HARDWARE: tl.constexpr):
    index = tl.arange(0, SIZE)
    code = tl.load(codes + index)
    tl.store(integer + index, widen_fp8(code, False))
    tl.store(hardware + index, widen_fp8(code, HARDWARE))
    tl.store(rounded + index, round_to_fp8(tl.load(integer + index).to(tl.float32)))


def test_all_float8_codes():
    codes = torch.arange(256, device=DEVICE).to(torch.uint8)
    integer, hardware = torch.zeros(2, 256, device=DEVICE, dtype=torch.float16)
    rounded = torch.zeros_like(codes)
    supported = torch.cuda.get_device_capability() >= (8, 9)
    convert_kernel[(1,)](codes, integer, hardware, rounded, SIZE=256, HARDWARE=supported)
    expected = codes.view(FP8).half()
    torch.testing.assert_close(integer, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(hardware, expected, rtol=0, atol=0, equal_nan=True)
    number = ~expected.isnan()
    assert torch.equal(rounded[number], codes[number])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_float8_writes_equal_those_of_the_torch_back_end(dtype):
    fused = torch.randn(50, 5, 80, device=DEVICE).mul(20).to(dtype)
    slots = torch.randperm(16 * 9, device=DEVICE)[:50]
    scales = torch.rand(2, 2, device=DEVICE) + 0.01
    caches = torch.zeros(2, 9, 2, 2, 16, 80, device=DEVICE).to(FP8)
    for cache, backend in zip(caches, ("triton", "torch")):
        write_kv(fused[:, :2], fused[:, 3:], cache, slots, kv_scales=scales, backend=backend)
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_writes_equal_those_of_the_torch_back_end(dtype):
    fused = torch.randn(50, 5, 80, device=DEVICE).to(dtype)
    slots = torch.randperm(16 * 9, device=DEVICE)[:50]
    slots[::7] = -1
    caches = torch.zeros(2, 9, 2, 2, 16, 80, device=DEVICE, dtype=dtype)
    for cache, backend in zip(caches, ("triton", "torch")):
        write_kv(fused[:, :2], fused[:, 3:], cache, slots, backend=backend)
    assert torch.equal(caches[0], caches[1])


CAPTURED = {
    "mixed": (MIXED, {}),
    "decodes": ([(1, 700), (1, 900)], {}),
    "cascade": ([(1, 1025 + n) for n in range(64)], {"shared_prefix": 1024, "dtype": torch.float16}),
}


@pytest.mark.parametrize(("sequences", "changes"), CAPTURED.values(), ids=CAPTURED.keys())
def test_a_captured_graph_serves_other_contents_of_the_same_tensors(sequences, changes):
    first = make_case(sequences, seed=1, device=DEVICE, **changes)
    other = make_case(sequences, seed=2, device=DEVICE, **changes)
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
