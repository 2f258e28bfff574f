"""`write_kv` and `attend` on the torch back end, against the float64 reference."""

import pytest
import torch
from attention_cases import FEATURES, MIXED, make_features
from pagedattn_reference import assert_close, make_case, reference

from pagedattn import AttentionBatch, attend, build_batch, write_kv
from pairwise import parametrize_pairs

HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32


def check(case, **options):
    result = attend(
        case.query,
        case.cache,
        case.batch,
        scale=0.2,
        kv_scales=case.kv_scales,
        backend="torch",
        **options,
    )
    assert_close(result, reference(case, scale=0.2, **options))


@parametrize_pairs(
    **FEATURES,
    head_dim=[32, 80, 96, 128, 256],
    block_size=[1, 8, 24, 64, 256],
    heads=[(4, 2), (4, 4), (4, 1), (9, 3), (1, 1)],
)
def test_every_two_features(
    sequences, dtype, fp8, window, soft_cap, alibi, sinks, head_dim, block_size, heads
):
    sizes = {"head_dim": head_dim, "block_size": block_size, "heads": heads}
    case, options = make_features(sequences, dtype, fp8, window, soft_cap, alibi, sinks, **sizes)
    check(case, **options)


def test_sequences_over_one_prefix():
    case = make_case([(1, 41), (1, 90), (33, 73), (20, 61), (5, 37)], shared_prefix=32)
    assert case.batch.shared_prefix == 32
    check(case)


@pytest.mark.parametrize("window", [None, 100])
def test_a_chunk_longer_than_one_masked_pass(window):
    sequences = [(300, 700), (520, 520)]
    case = make_case(sequences, q_heads=1, kv_heads=1, head_dim=32, forget_before=window or 0)
    check(case, window=window)


def test_materialised_scores_are_cut_into_passes(monkeypatch):
    monkeypatch.setattr("pagedattn.torch_backend.prefill.MAX_SCORES", 4 * 50 * 7)
    check(make_case([(30, 50)]), soft_cap=2.0)


def test_many_decodes_of_very_different_lengths():
    lengths = [1, 900, 3, 200, 16, 450, 64, 2] * 3
    check(make_case([(1, length) for length in lengths], q_heads=2, kv_heads=1))


def test_decodes_are_attended_in_several_chunks(monkeypatch):
    monkeypatch.setattr("pagedattn.torch_backend.decode.CHUNK_BYTES", 1)
    check(make_case([(1, length) for length in (5, 40, 17, 40)]))


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_a_sequence_reads_what_another_one_writes_in_the_same_step(backend):
    """Three sequences of the same tokens: one runs 10 of them, the others those from the ninth on."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(10, heads, 16, generator=generator) for heads in (4, 2, 2))
    batch = build_batch([1, 2, 10], [9, 10, 10], [[3, 5, 0], [3, 5, 1], [3, 5, 4]], block_size=4)
    assert batch.shared_prefix == 0
    positions = torch.tensor([8, 8, 9, *range(10)])
    cache = torch.full((6, 2, 2, 4, 16), torch.nan)
    write_kv(key[positions], value[positions], cache, batch.slots, backend=backend)
    out = attend(query[positions], cache, batch, scale=0.25, backend=backend)
    alone = torch.zeros(3, 2, 2, 4, 16)
    batch = build_batch([10], [10], [[0, 1, 2]], block_size=4)
    write_kv(key, value, alone, batch.slots, backend=backend)
    torch.testing.assert_close(out, attend(query, alone, batch, scale=0.25, backend=backend)[positions])


def test_an_empty_batch_gives_nothing():
    cache = torch.zeros(1, 2, 2, 4, 8)
    batch = build_batch([], [], [], block_size=4)
    write_kv(torch.zeros(0, 2, 8), torch.zeros(0, 2, 8), cache, batch.slots)
    assert attend(torch.zeros(0, 4, 8), cache, batch, scale=1.0).shape == (0, 4, 8)


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("options", [{}, {"sinks": torch.zeros(2)}, {"window": 2}], ids=str)
def test_rows_that_fill_up_a_batch_give_zero(decodes, options):
    case = make_case([(1, 6)], q_heads=2, kv_heads=1, head_dim=8)
    padded = AttentionBatch(
        query_starts=torch.tensor([0, 1, 2], dtype=torch.int32),
        lengths=torch.tensor([6, 0], dtype=torch.int32),
        block_table=torch.tensor([[*case.batch.block_table[0]], [-1]], dtype=torch.int32),
        slots=torch.tensor([*case.batch.slots, -1]),
        max_query=1,
        max_length=6,
        num_decodes=2 if decodes else 0,
    )
    result = attend(case.query.repeat(2, 1, 1), case.cache, padded, scale=0.2, **options)
    assert_close(result[:1], reference(case, scale=0.2, **options))
    assert torch.equal(result[1], torch.zeros(2, 8))


def test_layers_of_a_step_share_what_was_derived_from_the_batch():
    case = make_case(MIXED)
    first = attend(case.query, case.cache, case.batch, scale=0.2)
    derived = dict(case.batch.memo)
    second = attend(case.query, case.cache.clone(), case.batch, scale=0.2)
    assert torch.equal(first, second)
    assert derived.keys() == case.batch.memo.keys()
    assert all(case.batch.memo[key] is value for key, value in derived.items())


def test_layers_with_and_without_a_window_do_not_mix_up_their_plans():
    case = make_case(MIXED)
    for options in ({}, {"window": 8}, {"window": 20}, {}):
        check(case, **options)


def test_queries_and_outputs_may_be_slices_of_wider_tensors():
    case = make_case(MIXED)
    tokens = case.query.shape[0]
    fused = torch.zeros(tokens, 4 + 2 + 2, 64)
    fused[:, :4] = case.query
    wide = torch.full((tokens, 6, 64), 7.0)
    result = attend(fused[:, :4], case.cache, case.batch, scale=0.2, out=wide[:, 1:5])
    assert result.data_ptr() == wide[:, 1:5].data_ptr()
    assert_close(wide[:, 1:5], reference(case, scale=0.2))
    assert (wide[:, 0] == 7).all()
    assert (wide[:, 5] == 7).all()


def test_writing_puts_each_token_in_its_slot_and_skips_negative_ones():
    cache = torch.zeros(3, 2, 2, 4, 8)
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    write_kv(key, value, cache, torch.tensor([9, -1, 3]))
    expected = torch.zeros(3, 2, 2, 4, 8)
    expected[2, 0, :, 1], expected[2, 1, :, 1] = key[0], value[0]
    expected[0, 0, :, 3], expected[0, 1, :, 3] = key[2], value[2]
    assert torch.equal(cache, expected)


def test_a_prompt_in_chunks_and_then_decodes_gives_what_one_pass_gives():
    torch.manual_seed(0)
    query, key, value = (torch.randn(23, 2, 16) for _ in range(3))
    table = [[4, 1, 3, 0, 2, 5]]

    def run(chunks):
        cache, outputs, done = torch.full((6, 2, 2, 4, 16), torch.nan), [], 0
        for chunk in chunks:
            new = slice(done, done + chunk)
            done += chunk
            batch = build_batch([chunk], [done], table, block_size=4)
            write_kv(key[new], value[new], cache, batch.slots)
            outputs.append(attend(query[new], cache, batch, scale=0.25))
        return torch.cat(outputs)

    assert torch.allclose(run([23]), run([5, 7, 8, 1, 1, 1]), atol=1e-6)


CACHE = torch.zeros(4, 2, 2, 4, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query": torch.zeros(2, 4, 8)}, r"\[1, …, 8\], not \[2, 4, 8\]"),
        ({"query": torch.zeros(1, 4, 16)}, r"\[1, …, 8\], not \[1, 4, 16\]"),
        ({"query": torch.zeros(1, 3, 8)}, "3 query heads do not divide among 2 KV heads"),
        ({"query": torch.zeros(1, 4, 8, dtype=HALF)}, "query is torch.float16, the cache torch.float32"),
        ({"cache": CACHE[:, 0]}, "one layer's contiguous"),
        ({"cache": CACHE.transpose(3, 4)}, "one layer's contiguous"),
        ({"cache": CACHE.double()}, "bfloat16 or float8_e4m3fn, not torch.float64"),
        ({"cache": torch.zeros(4, 2, 2, 2, 8)}, "max_length 3 does not fit 1 block_table columns of 2"),
        ({"cache": CACHE.to("meta")}, "query is on cpu, the cache on meta"),
        ({"window": 0}, "window must be a whole number of at least 1 or None, not 0"),
        ({"soft_cap": 0.0}, "soft_cap must be finite and at least 1e-30 or None, not 0.0"),
        ({"alibi_slopes": torch.zeros(2)}, r"alibi_slopes must be \[4\], not \[2\]"),
        ({"sinks": torch.zeros(4, 1)}, r"sinks must be \[4\], not \[4, 1\]"),
        ({"out": torch.zeros(1, 4, 4)}, r"out is \(1, 4, 4\)"),
        ({"backend": "flash"}, "unknown attention back end 'flash'"),
    ],
)
def test_arguments_of_attend_that_do_not_fit_are_refused(arguments, message):
    batch = build_batch([1], [3], [[0]], block_size=4)
    fitting = {"query": torch.zeros(1, 4, 8), "cache": CACHE, "batch": batch, "scale": 1.0}
    with pytest.raises(ValueError, match=message):
        attend(**fitting | arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"key": torch.zeros(2, 2, 8)}, r"= \(1, 2, 8\), not \(2, 2, 8\)"),
        ({"value": torch.zeros(1, 2, 4)}, r"= \(1, 2, 8\), not \(1, 2, 8\) and \(1, 2, 4\)"),
        ({"value": torch.zeros(1, 2, 8, dtype=HALF)}, "value torch.float16, the cache torch.float32"),
        ({"slots": torch.zeros(1, dtype=torch.int32)}, "slots must be torch.int64"),
        ({"key": torch.zeros(1, 2, 8, device="meta")}, "key is on meta, the cache on cpu"),
    ],
)
def test_arguments_of_write_kv_that_do_not_fit_are_refused(arguments, message):
    fitting = {"key": torch.zeros(1, 2, 8), "value": torch.zeros(1, 2, 8), "cache": CACHE}
    with pytest.raises(ValueError, match=message):
        write_kv(**fitting | {"slots": torch.tensor([2])} | arguments)


def test_float8_writes_are_scaled_rounded_and_cut():
    cache = torch.zeros(2, 2, 2, 4, 3).to(torch.float8_e4m3fn)
    key = torch.tensor([[[1.0, 17.0, 5000.0], [3.0, -0.3, 0.0]]], dtype=BFLOAT)
    scales = torch.tensor([[1.0, 2.0], [4.0, 0.5]])
    write_kv(key, key, cache, torch.tensor([6]), kv_scales=scales, backend="torch")
    stored = cache.float()
    # e4m3 has three bits after the leading one: 17 lies between 16 and 18, 4.25 between 4 and 4.5.
    assert stored[1, 0, :, 2].tolist() == [[1.0, 16.0, 448.0], [1.5, -0.15625, 0.0]]
    assert stored[1, 1, :, 2].tolist() == [[0.25, 4.0, 448.0], [6.0, -0.625, 0.0]]
    assert stored.count_nonzero() == 10


def test_scales_belong_to_float8_caches():
    batch = build_batch([1], [1], [[0]], block_size=4)
    scales = torch.ones(2, 2)
    with pytest.raises(ValueError, match="belong to a float8_e4m3fn cache"):
        attend(torch.zeros(1, 4, 8), torch.zeros(1, 2, 2, 4, 8), batch, scale=1.0, kv_scales=scales)
    with pytest.raises(ValueError, match=r"float32 \[2, 2\]"):
        write_kv(
            torch.zeros(1, 2, 8),
            torch.zeros(1, 2, 8),
            torch.zeros(1, 2, 2, 4, 8).to(torch.float8_e4m3fn),
            torch.tensor([0]),
            kv_scales=torch.ones(2),
        )
