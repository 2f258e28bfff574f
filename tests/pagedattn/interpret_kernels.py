"""Runs the Triton back end in Triton's interpreter and reports differences from the reference, as JSON.

A program of its own, since TRITON_INTERPRET must be set before Triton is imported. No bfloat16: Triton
3.6's interpreter multiplies it wrongly without saying so.
"""

import json
import sys

import numpy as np
import torch
import triton
import triton.language as tl
from pagedattn_reference import make_case, reference

from pagedattn import AttentionBatch, attend, write_kv
from pagedattn.backends import ScoreOptions
from pagedattn.triton_backend.attention import attend_by_plan
from pagedattn.triton_backend.fp8 import round_to_fp8, widen_fp8
from pagedattn.triton_backend.plan import Device, make_plan, share_prefix

HALF, BFLOAT, FP8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
DEVICE = Device((8, 0), 1)
DECODES = [(1, 1), (1, 40), (1, 16)]
VERIFY = [(3, 33), (2, 2), (4, 50)]
MIXED = [(1, 33), (1, 5), (9, 9), (20, 50)]
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.02])
SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0])
ALL = {"window": 20, "soft_cap": 3.0, "alibi_slopes": SLOPES, "sinks": SINKS.half()}
# name: (sequences, how the case differs from make_case's defaults, options)
ATTEND = {
    "decodes": (DECODES, {}, {}),
    "verification": (VERIFY, {}, {}),
    "verification, all options": (VERIFY, {"forget_before": 20}, ALL),
    "nothing but prefills": ([(12, 12), (20, 50)], {}, {}),
    "mixed": (MIXED, {}, {}),
    "mixed fp16": (MIXED, {"dtype": HALF}, {}),
    "window": (MIXED, {"forget_before": 9}, {"window": 9}),
    "window of one": (DECODES, {"forget_before": 1}, {"window": 1}),
    "soft cap": (MIXED, {}, {"soft_cap": 2.0}),
    "alibi": (MIXED, {}, {"alibi_slopes": SLOPES}),
    "sinks": (MIXED, {}, {"sinks": SINKS}),
    "all options": (MIXED, {"forget_before": 20}, ALL),
    "all options fp16": (MIXED, {"forget_before": 20, "dtype": HALF}, ALL),
    "float8": (MIXED, {"fp8": True}, {}),
    "float8 fp16": (MIXED, {"fp8": True, "dtype": HALF}, {}),
    "float8 bf16, all options": (MIXED, {"fp8": True, "dtype": BFLOAT, "forget_before": 20}, ALL),
    "one query head a kv head": (MIXED, {"q_heads": 2}, {}),
    "groups of three": (MIXED, {"q_heads": 9, "kv_heads": 3}, {}),
    "one kv head": (MIXED, {"kv_heads": 1}, {}),
    "groups wider than a tile": ([(1, 20), (3, 9)], {"q_heads": 40, "kv_heads": 1}, {}),
    "head_dim 80": (MIXED, {"head_dim": 80}, {}),
    "head_dim 96 fp16": (DECODES, {"head_dim": 96, "dtype": HALF}, {}),
    "head_dim 112": (DECODES, {"head_dim": 112}, {}),
    "head_dim 256": (DECODES, {"head_dim": 256}, {}),
    "blocks of 8": (MIXED, {"block_size": 8}, {}),
    "blocks of 24": (MIXED, {"block_size": 24}, {}),
    "blocks of 256": (DECODES, {"block_size": 256}, {}),
    "prompts over several tiles": ([(70, 70), (1, 3), (65, 80)], {"q_heads": 2, "kv_heads": 1}, {}),
}
UNEVEN = [(1, 1), (1, 300), (1, 64)]
# name: (sequences, how the case differs, pieces, options); pieces outnumber the steps of short contexts, so
# that some are empty
SPLIT = {
    "two pieces": (UNEVEN, {}, 2, {}),
    "seven pieces": (UNEVEN, {}, 7, {}),
    "twenty pieces": (UNEVEN, {}, 20, {}),
    "seven pieces, window": (UNEVEN, {"forget_before": 90}, 7, {"window": 90}),
    "seven pieces, all options": (UNEVEN, {"forget_before": 20}, 7, ALL),
    "pieces of float8 fp16": (UNEVEN, {"fp8": True, "dtype": HALF}, 3, {}),
    "pieces beside prefills": ([(1, 200), (1, 9), (10, 40)], {}, 3, {"sinks": SINKS}),
    "pieces of verification": ([(3, 200), (2, 2), (4, 90)], {}, 3, {"window": 70}),
}
PREFIXED = [(1, 65), (1, 90), (1, 130), (1, 70)]
LIMITED = {"soft_cap": 3.0, "alibi_slopes": SLOPES, "sinks": SINKS}
# name: (sequences that share 64 positions, how the case differs, pieces of the prefix and the rest, options)
CASCADE = {
    "cascade": (PREFIXED, {}, (1, 1), {}),
    "cascade in pieces": (PREFIXED, {}, (3, 2), {}),
    "cascade, all but a window": (PREFIXED, {}, (2, 1), LIMITED),
    "cascade of float8 fp16": (PREFIXED, {"fp8": True, "dtype": HALF}, (2, 1), LIMITED),
    "cascade of verification": ([(3, 67), (1, 70), (2, 90)], {}, (1, 1), LIMITED),
    "cascade beside prefills": ([*PREFIXED, (10, 80)], {}, (2, 1), LIMITED),
    "cascade over several tiles": ([(1, 65 + n) for n in range(20)], {"kv_heads": 1}, (1, 1), {}),
    "cascade in blocks of 8": (PREFIXED, {"block_size": 8}, (1, 1), {}),
}


def difference(result, expected):
    """The largest; infinite if any element is not finite."""
    if not torch.isfinite(result).all():
        return float("inf")
    return np.abs(result.double().numpy() - expected).max()


def score_options(case, options):
    arguments = dict.fromkeys(ScoreOptions._fields) | {"scale": 0.2, "kv_scales": case.kv_scales}
    return ScoreOptions(**arguments | options)


def run_attend(sequences, changes, options):
    case = make_case(sequences, **{"head_dim": 32, **changes})
    scales = {"kv_scales": case.kv_scales}
    result = attend(case.query, case.cache, case.batch, scale=0.2, backend="triton", **scales, **options)
    return difference(result, reference(case, scale=0.2, **options))


def run_plan(case, plan, options):
    result = torch.full_like(case.query, torch.nan)
    attend_by_plan(case.query, case.cache, case.batch, score_options(case, options), result, plan)
    return difference(result, reference(case, scale=0.2, **options))


def run_split(sequences, changes, pieces, options):
    case = make_case(sequences, **{"head_dim": 32, **changes})
    plan = make_plan(case.query, case.cache, case.batch, options.get("window"), DEVICE)
    return run_plan(case, plan._replace(splits=pieces, min_piece=16), options)


def run_cascade(sequences, changes, pieces, options):
    case = make_case(sequences, **{"head_dim": 32, "shared_prefix": 64, **changes})
    plan = make_plan(case.query, case.cache, case.batch, None, DEVICE)
    plan = share_prefix(plan, case.query, case.cache, case.batch, DEVICE)
    return run_plan(case, plan._replace(prefix_splits=pieces[0], splits=pieces[1], min_piece=16), options)


def run_slices():
    """Queries cut from a fused projection, output into a wider tensor."""
    case = make_case(MIXED, head_dim=32)
    fused = torch.zeros(case.query.shape[0], 8, 32)
    fused[:, 1:5] = case.query
    wide = torch.full_like(fused, 7.0)
    attend(fused[:, 1:5], case.cache, case.batch, scale=0.2, out=wide[:, 2:6], backend="triton")
    untouched = torch.cat((wide[:, :2], wide[:, 6:]), dim=1)
    return difference(wide[:, 2:6], reference(case, scale=0.2)) + (untouched - 7).abs().max().item()


def run_padding(sinks):
    """A row of length 0 beside one of 6."""
    case = make_case([(1, 6)], q_heads=2, kv_heads=1, head_dim=32, block_size=4)
    padded = AttentionBatch(
        query_starts=torch.tensor([0, 1, 2], dtype=torch.int32),
        lengths=torch.tensor([6, 0], dtype=torch.int32),
        block_table=torch.tensor([[*case.batch.block_table[0]], [-1, -1]], dtype=torch.int32),
        slots=torch.tensor([*case.batch.slots, -1]),
        max_query=1,
        max_length=6,
        num_decodes=2,
        shared_prefix=4,
    )
    query = case.query.repeat(2, 1, 1)
    expected = np.concatenate((reference(case, scale=0.2, sinks=sinks), np.zeros((1, 2, 32))))
    options = ScoreOptions(0.2, None, None, None, sinks)
    whole = make_plan(query, case.cache, padded, None, DEVICE)
    prefixed = share_prefix(whole, query, case.cache, padded, DEVICE)
    differences = []
    for plan in (whole, whole._replace(splits=3), prefixed):
        result = torch.full_like(query, torch.nan)
        attend_by_plan(query, case.cache, padded, options, result, plan)
        differences.append(difference(result, expected))
    return max(differences)


def run_write(dtype):
    fused = torch.randn(4, 5, 24).to(dtype)
    key, value, slots = fused[:, :3], fused[:, 2:], torch.tensor([9, -1, 3, 11])
    cache = torch.zeros(3, 2, 3, 4, 24, dtype=dtype)
    write_kv(key, value, cache, slots, backend="triton")
    expected = torch.zeros(3, 2, 3, 4, 24)
    for token, (block, offset) in {0: (2, 1), 2: (0, 3), 3: (2, 3)}.items():
        expected[block, 0, :, offset], expected[block, 1, :, offset] = key[token], value[token]
    return difference(cache, expected.double().numpy())


@triton.jit
def convert_kernel(codes, wide, by_hardware, rounded, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    code = tl.load(codes + index)
    tl.store(wide + index, widen_fp8(code, False))
    tl.store(by_hardware + index, widen_fp8(code, True))
    tl.store(rounded + index, round_to_fp8(tl.load(wide + index).to(tl.float32)))


@triton.jit
def round_kernel(numbers, codes, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(codes + index, round_to_fp8(tl.load(numbers + index)))


def run_codes():
    """All 256 codes, widened in both ways and rounded back: how many differ from torch's.

    NaN is left out of what the interpreter does in the hardware's stead, since it makes a number of it.
    """
    codes = torch.arange(256).to(torch.uint8)
    wide, by_hardware, rounded = torch.zeros(256).half(), torch.zeros(256).half(), torch.zeros_like(codes)
    convert_kernel[(1,)](codes, wide, by_hardware, rounded, 256)
    expected = codes.view(FP8).half()
    number = ~expected.isnan()
    wrong = (wide != expected)[number].sum() + (by_hardware != expected)[number].sum()
    wrong += (~wide.isnan())[~number].sum() + (rounded != codes)[number].sum()
    return int(wrong + (rounded & 0x7F != 0x7F)[~number].sum())


def run_rounding():
    """Numbers of all magnitudes, and those halfway between codes: how many differ from torch's rounding."""
    values = torch.arange(127).to(torch.uint8).view(FP8).float()
    halfway = (values[:-1] + values[1:]) / 2
    near = torch.cat((halfway, halfway * (1 + 2**-22), halfway * (1 - 2**-22)))
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(1600, generator=generator) * 2.0 ** torch.randint(
        -14, 14, (1600,), generator=generator
    )
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e30, 448.0, 464.0, 465.0, 2**-10])
    numbers = torch.cat((near, -near[: 2048 - 10 - 1600 - len(near)], spread, special))
    numbers = torch.nn.functional.pad(numbers, (0, 2048 - len(numbers)))
    codes = torch.zeros(2048, dtype=torch.uint8)
    round_kernel[(1,)](numbers, codes, 2048)
    expected = numbers.clamp(-448, 448).to(FP8).view(torch.uint8)
    return int((codes != expected).sum())


def run_write_fp8(dtype):
    key, value = (torch.randn(5, 3, 24).mul(20).to(dtype) for _ in range(2))
    key[0, 0, 0] = 5000.0
    slots, scales = torch.tensor([9, -1, 3, 11, 0]), torch.tensor([[0.5, 0.03, 1.7], [2.0, 0.3, 0.011]])
    caches = torch.zeros(2, 3, 2, 3, 4, 24, dtype=FP8)
    for cache, backend in zip(caches, ("triton", "torch")):
        write_kv(key, value, cache, slots, kv_scales=scales, backend=backend)
    return int((caches.view(torch.uint8)[0] != caches.view(torch.uint8)[1]).sum())


def main():
    reports = {name: run_attend(*case) for name, case in ATTEND.items()}
    reports |= {name: run_split(*case) for name, case in SPLIT.items()}
    reports |= {name: run_cascade(*case) for name, case in CASCADE.items()}
    reports["slices"] = run_slices()
    reports["padding"] = run_padding(None)
    reports["padding, sinks"] = run_padding(torch.ones(2))
    exact = {
        "write_kv": run_write(torch.float32),
        "write_kv fp16": run_write(HALF),
        "write_kv float8 of float32": run_write_fp8(torch.float32),
        "write_kv float8 of bf16": run_write_fp8(BFLOAT),
        "float8 codes": run_codes(),
        "rounding to float8": run_rounding(),
    }
    json.dump({"close": reports, "exact": exact}, sys.stdout)


if __name__ == "__main__":
    main()
