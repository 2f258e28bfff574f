"""The C kernels against the float64 reference, on one thread and on several."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from attention_cases import FEATURES, make_features
from pagedattn_reference import assert_close, make_case, reference

from pagedattn import AttentionBatch, attend, write_kv
from pairwise import parametrize_pairs

HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32


@contextmanager
def compute_threads(number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check(case, **options):
    out = torch.full_like(case.query, torch.nan)
    attend(
        case.query,
        case.cache,
        case.batch,
        scale=0.2,
        kv_scales=case.kv_scales,
        out=out,
        backend="cpu",
        **options,
    )
    assert_close(out, reference(case, scale=0.2, **options))


@parametrize_pairs(
    **FEATURES,
    head_dim=[8, 20, 80, 112, 128, 192, 256],
    block_size=[1, 8, 24, 64, 256],
    heads=[(4, 2), (9, 3), (16, 1), (17, 1), (71, 1)],
    num_threads=[1, 3],
)
def test_every_two_features(
    sequences, dtype, fp8, window, soft_cap, alibi, sinks, head_dim, block_size, heads, num_threads
):
    sizes = {"head_dim": head_dim, "block_size": block_size, "heads": heads}
    case, options = make_features(sequences, dtype, fp8, window, soft_cap, alibi, sinks, **sizes)
    with compute_threads(num_threads):
        check(case, **options)


def test_heads_that_fill_more_than_one_tile():
    check(make_case([(1, 20), (1, 900), (7, 7), (7, 12)], q_heads=130, kv_heads=1, head_dim=16))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_long_contexts_of_groups_wider_than_a_tile(num_threads):
    with compute_threads(num_threads):
        check(make_case([(1, 1500), (3, 3000), (40, 1200)], q_heads=71, kv_heads=1, head_dim=16))
        check(make_case([(1, 1500), (3, 900)], q_heads=80, kv_heads=1, head_dim=16))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_long_contexts_are_cut_for_several_threads(num_threads):
    with compute_threads(num_threads):
        check(make_case([(1, 9000)], q_heads=3, kv_heads=1, head_dim=32))
        case = make_case([(1, 5000), (300, 2900)], q_heads=3, kv_heads=1, head_dim=32)
        check(case, sinks=torch.ones(3))


@pytest.mark.parametrize(("seed", "num_threads"), [(0, 1), (1, 3), (4, 3)])
def test_random_batches(seed, num_threads):
    generator = np.random.default_rng(seed)
    decodes = [(1, int(length)) for length in generator.integers(1, 1500, generator.integers(0, 20))]
    others = [
        (int(generator.integers(0, length + 1)), int(length)) for length in generator.integers(1, 400, 4)
    ]
    kv_heads = int(generator.integers(1, 4))
    case = make_case(
        decodes + others,
        q_heads=kv_heads * int(generator.integers(1, 6)),
        kv_heads=kv_heads,
        head_dim=32,
        block_size=int(generator.integers(1, 40)),
        seed=seed,
    )
    with compute_threads(num_threads):
        check(case)


@pytest.mark.parametrize("shared", [0, 64])
@pytest.mark.parametrize("sinks", [None, torch.zeros(2)], ids=["", "sinks"])
def test_rows_that_fill_up_a_batch_give_zero(shared, sinks):
    case = make_case([(1, 70 + i) for i in range(7)], q_heads=2, kv_heads=1, shared_prefix=shared)
    full = case.batch
    padded = AttentionBatch(
        query_starts=torch.arange(9, dtype=torch.int32),
        lengths=torch.cat((full.lengths, torch.zeros(1, dtype=torch.int32))),
        block_table=torch.cat((full.block_table, torch.full_like(full.block_table[:1], -1))),
        slots=torch.cat((full.slots, torch.tensor([-1]))),
        max_query=1,
        max_length=full.max_length,
        num_decodes=8,
        shared_prefix=full.shared_prefix,
    )
    query = torch.cat((case.query, case.query[:1]))
    out = torch.full_like(query, torch.nan)
    with compute_threads(3):
        attend(query, case.cache, padded, scale=0.2, sinks=sinks, out=out, backend="cpu")
    assert_close(out[:7], reference(case, scale=0.2, sinks=sinks))
    assert torch.equal(out[7], torch.zeros(2, 64))


@pytest.mark.parametrize("sink", [-torch.inf, torch.inf])
def test_rows_of_no_length_give_zero_whatever_the_sinks(sink):
    batch = AttentionBatch(
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        lengths=torch.tensor([0], dtype=torch.int32),
        block_table=torch.tensor([[-1]], dtype=torch.int32),
        slots=torch.tensor([-1]),
        max_query=1,
        max_length=0,
        num_decodes=1,
    )
    sinks = torch.full((2,), sink)
    out = attend(
        torch.ones(1, 2, 16), torch.ones(1, 2, 1, 4, 16), batch, scale=1.0, sinks=sinks, backend="cpu"
    )
    assert torch.equal(out, torch.zeros(1, 2, 16))


@pytest.mark.parametrize("window", [2**31, 2**32 + 5])
def test_windows_beyond_every_context_are_none(window):
    check(make_case([(1, 40), (9, 30)]), window=window)


@pytest.mark.parametrize("soft_cap", [1e-2, 30.0, 1e4, 1e8])
def test_soft_caps_of_every_size(soft_cap):
    case = make_case([(1, 40), (9, 30)])
    check(case, soft_cap=soft_cap)


def test_nan_of_any_kind_stays_nan():
    case = make_case([(1, 5)], q_heads=2, kv_heads=1, head_dim=16)
    payload = torch.tensor([0x7FC00001, -1], dtype=torch.int32).view(torch.float32)
    for nan in payload:
        cache = case.cache.clone()
        cache[case.batch.block_table[0, 0], 0, :, 2] = nan
        assert attend(case.query, cache, case.batch, scale=0.2, backend="cpu").isnan().all()


WRONG_BATCHES = {
    "starts that go down": ({"query_starts": [0, 2, 1, 2], "num_decodes": 0}, "query_starts must go from 0"),
    "starts beyond the tokens": ({"query_starts": [0, 1, 2, 9]}, "query_starts must go from 0"),
    "more queries than tokens": ({"lengths": [9, 4, 0], "query_starts": [0, 1, 1, 2]}, None),
    "lengths beyond the table": ({"lengths": [9, 400, 3]}, "what its block table holds"),
    "negative lengths": ({"lengths": [9, -1, 3]}, "what its block table holds"),
    "decodes that are none": ({"query_starts": [0, 0, 1, 2]}, "must have one query each"),
    "a prefix beyond the first query": ({"shared_prefix": 12}, "reaches beyond the first query"),
    "a block of another cache": ({"block_table": [[0, 1, 9], [1, 2, 3], [3, 0, 0]]}, "not one of the cache"),
    "no block": ({"block_table": [[0, -1, 0], [1, 2, 3], [3, 0, 0]]}, "not one of the cache"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG_BATCHES.values(), ids=WRONG_BATCHES.keys())
def test_batches_that_would_read_elsewhere_are_refused(changes, message):
    fields = {
        "query_starts": [0, 1, 2, 2],
        "lengths": [9, 10, 3],
        "block_table": [[0, 1, 2], [1, 2, 3], [3, 0, 0]],
        "max_query": 1,
        "max_length": 10,
        "num_decodes": 2,
    } | changes
    tensors = {
        name: torch.tensor(value, dtype=torch.int32) if isinstance(value, list) else value
        for name, value in fields.items()
    }
    batch = AttentionBatch(**tensors, slots=torch.tensor([-1, -1]))
    query, cache = torch.zeros(2, 2, 16), torch.zeros(4, 2, 1, 4, 16)
    if message is None:
        attend(query, cache, AttentionBatch(**{**tensors, "num_decodes": 1}, slots=batch.slots), scale=1.0)
        return
    with pytest.raises(IndexError, match=message):
        attend(query, cache, batch, scale=1.0, backend="cpu")


def test_slots_beyond_the_cache_are_refused_and_nothing_is_stored():
    cache = torch.zeros(2, 2, 1, 4, 16)
    with pytest.raises(IndexError, match="slot 8 of token 1 is not in the cache, which has 8 slots"):
        write_kv(torch.ones(2, 1, 16), torch.ones(2, 1, 16), cache, torch.tensor([0, 8]), backend="cpu")
    assert cache.count_nonzero() == 0


def test_slices_of_a_fused_projection_and_of_a_wider_output():
    case = make_case([(1, 33), (7, 20)], head_dim=32)
    fused = torch.zeros(8, 8, 32)
    fused[:, 1:5] = case.query
    wide = torch.full((8, 8, 32), 7.0)
    attend(fused[:, 1:5], case.cache, case.batch, scale=0.2, out=wide[:, 2:6], backend="cpu")
    assert_close(wide[:, 2:6], reference(case, scale=0.2))
    assert (wide[:, :2] == 7).all()
    assert (wide[:, 6:] == 7).all()


@pytest.mark.parametrize("last_first", [True, False])
def test_tensors_whose_head_dim_is_not_contiguous(last_first):
    case = make_case([(1, 33), (7, 20)], head_dim=32)
    turned = case.query.transpose(1, 2).contiguous().transpose(1, 2)
    out = torch.full_like(turned, torch.nan) if last_first else torch.full_like(case.query, torch.nan)
    attend(turned, case.cache, case.batch, scale=0.2, out=out, backend="cpu")
    assert_close(out, reference(case, scale=0.2))


def test_a_row_gives_the_same_whatever_its_neighbours():
    case = make_case([(1, 300), (1, 40), (20, 90)])
    together = attend(case.query, case.cache, case.batch, scale=0.2, backend="cpu")
    alone = make_case([(1, 300)])
    alone.batch.block_table[0] = case.batch.block_table[0, : alone.batch.block_table.shape[1]]
    result = attend(case.query[:1], case.cache, alone.batch, scale=0.2, backend="cpu")
    assert torch.allclose(result, together[:1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [SINGLE, BFLOAT, HALF], ids=str)
def test_writes_go_to_their_slots_as_they_are(dtype):
    fused = torch.randn(4, 5, 24).to(dtype)
    key, value = fused[:, :3], fused[:, 2:]
    cache = torch.zeros(3, 2, 3, 4, 24, dtype=dtype)
    write_kv(key, value, cache, torch.tensor([9, -1, 3, 11]), backend="cpu")
    expected = torch.zeros(3, 2, 3, 4, 24, dtype=dtype)
    for token, (block, offset) in {0: (2, 1), 2: (0, 3), 3: (2, 3)}.items():
        expected[block, 0, :, offset], expected[block, 1, :, offset] = key[token], value[token]
    assert torch.equal(cache, expected)


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(SINGLE, 16), (SINGLE, 20), (BFLOAT, 16), (HALF, 20)], ids=str
)
def test_float8_writes_are_those_of_torch(dtype, head_dim):
    # Every magnitude that matters: subnormals, ties, what is cut, zeros of both signs.
    steps = torch.arange(-6, 40 * head_dim - 6) * 2.0**-11
    key = torch.cat((steps, steps * 300, -steps, -steps * 3e4)).view(-1, 2, head_dim).to(dtype)
    scales = torch.tensor([[1.0, 0.5], [3.0, 0.01]])
    results = {}
    for backend in ("torch", "cpu"):
        cache = torch.zeros(len(key), 2, 2, 1, head_dim).to(torch.float8_e4m3fn)
        write_kv(key, key, cache, torch.arange(len(key)), kv_scales=scales, backend=backend)
        results[backend] = cache.view(torch.uint8)
    assert torch.equal(results["torch"], results["cpu"])


def test_all_float8_codes_are_read_as_torch_reads_them():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = codes.float().isfinite()
    values = codes.float()[finite]
    # One key a block, one query that sees it alone: the result is the value.
    cache = torch.zeros(len(values), 2, 1, 1, 16, dtype=torch.uint8).view(torch.float8_e4m3fn)
    cache[:, 1] = codes[finite].view(-1, 1, 1, 1).expand(-1, 1, 1, 16)
    count = len(values)
    batch = AttentionBatch(
        query_starts=torch.arange(count + 1, dtype=torch.int32),
        lengths=torch.ones(count, dtype=torch.int32),
        block_table=torch.arange(count, dtype=torch.int32).view(-1, 1),
        slots=torch.full((count,), -1),
        max_query=1,
        max_length=1,
        num_decodes=count,
    )
    result = attend(torch.zeros(count, 1, 16), cache, batch, scale=1.0, backend="cpu")
    assert torch.equal(result[:, 0, 0], values)
