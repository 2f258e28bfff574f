"""A decode step in a CUDA graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gpu_check.case import Case, compare, make_case
from pagedattn import rms_norm, rotary, silu_and_mul, top_k_top_p_sample, write_kv

CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"fp8": True},
    "shared prefix": {"shared_prefix": 1024},
}


def check_graph(interpret: bool) -> dict[str, Any]:
    """A captured step replayed over new contents of the same tensors gives what running it gives."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    checks = {}
    for name, changes in CASES.items():
        case, other = (
            make_case([(1, 1200 + 7 * i) for i in range(16)], device=device, **changes) for _ in range(2)
        )
        weights = _Weights(case)
        weights.step(case)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            hidden, tokens = weights.step(case)
        for target, source in (
            (case.query, other.query),
            (case.cache, other.cache),
            (case.batch.block_table, other.batch.block_table),
            (case.batch.slots, other.batch.slots),
        ):
            target.copy_(source)
        graph.replay()
        replayed, drawn = hidden.clone(), tokens.clone()
        expected, expected_tokens = weights.step(replace(other, kv_scales=case.kv_scales))
        checks[f"{name}, output"] = compare(replayed, expected, tolerance=0.0)
        checks[f"{name}, tokens"] = compare(drawn.double(), expected_tokens, tolerance=0.0)
    return {"checks": checks}


class _Weights:
    """Weights of a decode step, beside queries and cache."""

    def __init__(self, case: Case) -> None:
        tokens, heads, head_dim = case.query.shape
        device, dtype = case.query.device, case.query.dtype
        self.norm = torch.randn(heads * head_dim, device=device).to(dtype)
        self.head = torch.randn(heads * head_dim // 2, 1000, device=device).to(dtype)
        self.cos_sin = torch.randn(tokens, head_dim, device=device)
        self.settings = {
            "temperature": torch.ones(tokens, device=device),
            "top_k": torch.full((tokens,), 50, dtype=torch.int32, device=device),
            "top_p": torch.full((tokens,), 0.9, device=device),
            "min_p": torch.zeros(tokens, device=device),
            "seeds": torch.arange(tokens, device=device),
            "positions": torch.arange(tokens, device=device),
        }

    def step(self, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        """Every operation once: the gated output [tokens, …] and the tokens drawn."""
        kv_heads = case.cache.shape[2]
        normed = rms_norm(case.query.flatten(1), self.norm, 1e-6).view_as(case.query)
        query, key = rotary(normed, normed[:, :kv_heads], None, self.cos_sin)
        write_kv(key, key, case.cache, case.batch.slots, kv_scales=case.kv_scales)
        mixed = replace(case, query=query).attend({})
        hidden = silu_and_mul(mixed.flatten(1))
        return hidden, top_k_top_p_sample(hidden @ self.head, **self.settings, backend="triton")
