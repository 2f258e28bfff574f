"""Attention with all options against float64."""

from __future__ import annotations

from typing import Any

import torch

from gpu_check.case import compare, expected_attention, make_case

SINGLE, HALF, BFLOAT = torch.float32, torch.float16, torch.bfloat16
MIXED = [(1, 1), (1, 700), (1, 16), (1, 17), (133, 133), (20, 361), (5, 5)]
SHORT = [(1, 33), (1, 5), (7, 7), (20, 50)]
DECODES = [(1, 700), (1, 3), (1, 150)]
LONG = [(1, 9000), (1, 5000)]
DRAFTS = [(4, 90), (3, 300), (1, 40)]
SHARED = [(1, 1100 + 30 * i) for i in range(40)]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "soft cap": {"soft_cap": 2.0},
    "alibi": {"alibi_slopes": True},
    "sinks": {"sinks": True},
    "all": {"window": 20, "soft_cap": 3.0, "alibi_slopes": True, "sinks": True},
}
# The sequences and how they differ from make_case's defaults; each with the options named.
CASES: list[tuple[str, list[tuple[int, int]], dict[str, Any], list[str]]] = [
    ("mixed bf16", MIXED, {}, list(OPTIONS)),
    ("mixed fp16", MIXED, {"dtype": HALF}, ["plain", "all"]),
    ("mixed fp32", MIXED, {"dtype": SINGLE}, ["plain", "all"]),
    ("mixed fp8", MIXED, {"fp8": True}, ["plain", "all"]),
    ("decodes bf16", DECODES, {}, ["plain", "window", "all"]),
    ("decodes fp8", DECODES, {"fp8": True}, ["plain", "all"]),
    ("drafts bf16", DRAFTS, {}, ["plain", "all"]),
    ("split bf16", LONG, {"kv_heads": 1}, ["plain", "window", "all"]),
    ("split fp8", LONG, {"kv_heads": 1, "fp8": True}, ["plain"]),
    ("shared prefix bf16", SHARED, {"shared_prefix": 1024}, ["plain", "soft cap", "sinks"]),
    ("shared prefix fp8", SHARED, {"shared_prefix": 1024, "fp8": True}, ["plain"]),
    ("head_dim 80", MIXED, {"head_dim": 80}, ["plain"]),
    ("head_dim 128", MIXED, {"head_dim": 128}, ["plain", "all"]),
    ("head_dim 128 fp8", MIXED, {"head_dim": 128, "fp8": True}, ["plain"]),
    ("head_dim 256", MIXED, {"head_dim": 256}, ["plain"]),
    ("head_dim 32, one head a KV head", MIXED, {"head_dim": 32, "q_heads": 2}, ["plain"]),
    ("groups of 3", MIXED, {"q_heads": 9, "kv_heads": 3}, ["plain"]),
    ("groups of 40", DECODES, {"q_heads": 40, "kv_heads": 1}, ["plain"]),
    ("blocks of 24", MIXED, {"block_size": 24}, ["plain"]),
    ("blocks of 256", DECODES, {"block_size": 256}, ["plain"]),
]
# No bfloat16: Triton 3.6's interpreter multiplies it wrongly.
INTERPRETED: list[tuple[str, list[tuple[int, int]], dict[str, Any], list[str]]] = [
    ("mixed fp32", SHORT, {"dtype": SINGLE, "head_dim": 32}, list(OPTIONS)),
    ("mixed fp16", SHORT, {"dtype": HALF, "head_dim": 32}, ["all"]),
    ("mixed fp8", SHORT, {"dtype": HALF, "fp8": True, "head_dim": 32}, ["all"]),
    ("decodes fp32", [(1, 33), (1, 5)], {"dtype": SINGLE, "head_dim": 32}, ["plain", "all"]),
    ("drafts fp32", [(4, 9), (3, 30)], {"dtype": SINGLE, "head_dim": 32}, ["plain"]),
    ("split fp32", [(1, 600), (1, 300)], {"dtype": SINGLE, "head_dim": 32, "kv_heads": 1}, ["plain"]),
    ("head_dim 80", SHORT, {"dtype": SINGLE, "head_dim": 80}, ["plain"]),
    (
        "shared prefix fp32",
        [(1, 150), (1, 140), (1, 129)],
        {"dtype": SINGLE, "head_dim": 32, "shared_prefix": 128},
        ["plain"],
    ),
]


def check_attention(interpret: bool) -> dict[str, Any]:
    """Every case against float64."""
    torch.manual_seed(0)
    device = torch.device("cpu" if interpret else "cuda")
    checks = {}
    for name, sequences, changes, chosen in INTERPRETED if interpret else CASES:
        case = make_case(sequences, device=device, **changes)
        for option in chosen:
            options = _with_tensors(OPTIONS[option], case.query.shape[1], device)
            checks[f"{name}, {option}"] = compare(case.attend(options), expected_attention(case, **options))
    return {"checks": checks}


def _with_tensors(options: dict[str, Any], q_heads: int, device: torch.device) -> dict[str, Any]:
    """`options` with slopes and sinks for each head in place of True."""
    per_head = {
        "alibi_slopes": torch.linspace(0.5, 0.02, q_heads, device=device),
        "sinks": torch.linspace(-1, 3, q_heads, device=device),
    }
    return {name: per_head[name] if value is True else value for name, value in options.items()}
