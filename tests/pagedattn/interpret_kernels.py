"""Runs the Triton back end in Triton's interpreter and reports differences from the reference, as JSON.

A program of its own, since TRITON_INTERPRET must be set before Triton is imported. No bfloat16: Triton
3.6's interpreter multiplies it wrongly without saying so.
"""

import json
import sys

import numpy as np
import torch
from pagedattn_reference import make_case, reference

from pagedattn import AttentionBatch, attend, triton_backend, write_kv
from pagedattn.backends import ScoreOptions

HALF = torch.float16
DECODES = [(1, 1), (1, 40), (1, 16)]
MIXED = [(1, 33), (1, 5), (7, 7), (20, 50)]
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.02])
SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0])
ALL = {"window": 20, "soft_cap": 3.0, "alibi_slopes": SLOPES, "sinks": SINKS.half()}
# name: (sequences, how the case differs from make_case's defaults, options)
ATTEND = {
    "decodes": (DECODES, {}, {}),
    "mixed": (MIXED, {}, {}),
    "mixed fp16": (MIXED, {"dtype": HALF}, {}),
    "window": (MIXED, {"forget_before": 9}, {"window": 9}),
    "window of one": (DECODES, {"forget_before": 1}, {"window": 1}),
    "soft cap": (MIXED, {}, {"soft_cap": 2.0}),
    "alibi": (MIXED, {}, {"alibi_slopes": SLOPES}),
    "sinks": (MIXED, {}, {"sinks": SINKS}),
    "all options": (MIXED, {"forget_before": 20}, ALL),
    "all options fp16": (MIXED, {"forget_before": 20, "dtype": HALF}, ALL),
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
# name: (pieces, options); pieces outnumber the tiles of the short contexts, so some are empty
SPLIT = {
    "two pieces": (2, {}),
    "seven pieces": (7, {}),
    "seven pieces, window": (7, {"window": 90}),
    "seven pieces, all options": (7, ALL),
}


def difference(result, expected):
    """The largest; infinite if any element is not finite."""
    if not torch.isfinite(result).all():
        return float("inf")
    return np.abs(result.double().numpy() - expected).max()


def run_attend(sequences, changes, options):
    case = make_case(sequences, **{"head_dim": 32, **changes})
    result = attend(case.query, case.cache, case.batch, scale=0.2, backend="triton", **options)
    return difference(result, reference(case, scale=0.2, **options))


def run_split(pieces, options):
    case = make_case([(1, 1), (1, 300), (1, 64)], head_dim=32, forget_before=options.get("window", 0))
    arguments = dict.fromkeys(ScoreOptions._fields) | {"scale": 0.2} | options
    result = torch.full_like(case.query, torch.nan)
    triton_backend.attend_split(case.query, case.cache, case.batch, ScoreOptions(**arguments), result, pieces)
    return difference(result, reference(case, scale=0.2, **options))


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
    case = make_case([(1, 6)], q_heads=2, kv_heads=1, head_dim=32)
    padded = AttentionBatch(
        query_starts=torch.tensor([0, 1, 2], dtype=torch.int32),
        lengths=torch.tensor([6, 0], dtype=torch.int32),
        block_table=torch.tensor([[*case.batch.block_table[0]], [-1]], dtype=torch.int32),
        slots=torch.tensor([*case.batch.slots, -1]),
        max_query=1,
        max_length=6,
        num_decodes=2,
    )
    query = case.query.repeat(2, 1, 1)
    result = attend(query, case.cache, padded, scale=0.2, sinks=sinks, backend="triton")
    pieces = torch.full_like(query, torch.nan)
    triton_backend.attend_split(
        query, case.cache, padded, ScoreOptions(0.2, None, None, None, sinks), pieces, 3
    )
    expected = np.concatenate((reference(case, scale=0.2, sinks=sinks), np.zeros((1, 2, 32))))
    return max(difference(result, expected), difference(pieces, expected))


def run_write(dtype):
    fused = torch.randn(4, 5, 24).to(dtype)
    key, value, slots = fused[:, :3], fused[:, 2:], torch.tensor([9, -1, 3, 11])
    cache = torch.zeros(3, 2, 3, 4, 24, dtype=dtype)
    write_kv(key, value, cache, slots, backend="triton")
    expected = torch.zeros(3, 2, 3, 4, 24)
    for token, (block, offset) in {0: (2, 1), 2: (0, 3), 3: (2, 3)}.items():
        expected[block, 0, :, offset], expected[block, 1, :, offset] = key[token], value[token]
    return difference(cache, expected.double().numpy())


def main():
    reports = {name: run_attend(*case) for name, case in ATTEND.items()}
    reports |= {name: run_split(*case) for name, case in SPLIT.items()}
    reports["slices"] = run_slices()
    reports["padding"] = run_padding(None)
    reports["padding, sinks"] = run_padding(torch.ones(2))
    reports["write_kv"] = run_write(torch.float32)
    reports["write_kv fp16"] = run_write(HALF)
    json.dump(reports, sys.stdout)


if __name__ == "__main__":
    main()
