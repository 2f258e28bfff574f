"""Random batches over paged caches, and attention over them in plain float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pagedattn import AttentionBatch, attend, build_batch

FP8 = torch.float8_e4m3fn
# float32 runs as three TF32 products; the others round weights and results to their type.
TOLERANCE = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class Case:
    """A batch; sequence i has `query_lengths[i]` queries at the end of `lengths[i]` tokens."""

    query: torch.Tensor  # [tokens, q_heads, head_dim]
    cache: torch.Tensor  # [num_blocks, 2, kv_heads, block_size, head_dim]
    kv_scales: torch.Tensor | None
    batch: AttentionBatch
    query_lengths: list[int]
    lengths: list[int]
    tables: list[list[int]]

    def attend(self, options: dict[str, Any]) -> torch.Tensor:
        """Run the case on the Triton back end."""
        scale = self.query.shape[2] ** -0.5
        scales = {} if self.kv_scales is None else {"kv_scales": self.kv_scales}
        return attend(self.query, self.cache, self.batch, scale=scale, backend="triton", **options, **scales)


def make_case(
    sequences: list[tuple[int, int]],
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    fp8: bool = False,
    q_heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    shared_prefix: int = 0,
) -> Case:
    """`sequences` are (query length, length); the first `shared_prefix` positions share their blocks."""
    counts = [-(-length // block_size) for _, length in sequences]
    shared = shared_prefix // block_size
    order = torch.randperm(sum(counts) + 1).tolist()
    tables, place = [], shared
    for count in counts:
        tables.append(order[:shared] + order[place : place + count - shared])
        place += count - shared
    cache = torch.randn(len(order), 2, kv_heads, block_size, head_dim, device=device).to(dtype)
    query_lengths, lengths = [list(numbers) for numbers in zip(*sequences)]
    return Case(
        query=torch.randn(sum(query_lengths), q_heads, head_dim, device=device).to(dtype),
        cache=cache.to(FP8) if fp8 else cache,
        kv_scales=torch.rand(2, kv_heads, device=device) + 0.5 if fp8 else None,
        batch=build_batch(query_lengths, lengths, tables, block_size=block_size, device=device),
        query_lengths=query_lengths,
        lengths=lengths,
        tables=tables,
    )


def expected_attention(
    case: Case,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """float64 `[tokens, q_heads, head_dim]`, a sequence at a time."""
    kv_heads, head_dim = case.cache.shape[2], case.cache.shape[4]
    group = case.query.shape[1] // kv_heads
    parts = []
    for query, length, table in zip(case.query.split(case.query_lengths), case.lengths, case.tables):
        blocks = case.cache.view(torch.uint8)[table].view(case.cache.dtype).double()
        if case.kv_scales is not None:
            blocks = blocks * case.kv_scales[..., None, None].double()
        by_position = blocks.permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, head_dim)[:, :, :length]
        keys, values = by_position.repeat_interleave(group, dim=1)  # [q_heads, length, head_dim]
        scores = query.double().transpose(0, 1) @ keys.mT * head_dim**-0.5
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        positions = torch.arange(length, device=query.device)
        distance = positions - positions[length - len(query) :, None]
        if alibi_slopes is not None:
            scores = scores + alibi_slopes.double()[:, None, None] * distance
        visible = distance <= 0 if window is None else (distance <= 0) & (distance > -window)
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(query), 1)), dim=-1)
        weights = scores.softmax(-1)[..., :length]
        parts.append((weights @ values).transpose(0, 1))
    return torch.cat(parts)


def compare(result: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> dict[str, Any]:
    """A check's entry: the largest difference, relative for numbers above 1, and what is allowed."""
    allowed = TOLERANCE[result.dtype] if tolerance is None else tolerance
    error = (result.double() - expected.double()).abs() / expected.double().abs().clamp(min=1)
    largest = float(error.max()) if error.numel() else 0.0
    # NaN is not within anything; JSON has no word for it.
    passed = result.shape == expected.shape and largest <= allowed
    return {"passed": passed, "difference": largest if largest == largest else "NaN", "tolerance": allowed}
