"""An oracle for attention that shares nothing with the package: float64 loops in numpy."""

from dataclasses import dataclass

import numpy as np
import torch

from pagedattn import AttentionBatch, build_batch


@dataclass
class Case:
    """A batch whose cache holds NaN wherever no token was stored, in blocks in random order."""

    query: torch.Tensor  # [tokens, q_heads, head_dim]
    cache: torch.Tensor
    batch: AttentionBatch
    keys: list[np.ndarray]  # per sequence [length, kv_heads, head_dim], as rounded to the cache's dtype
    values: list[np.ndarray]
    query_lengths: list[int]


def make_case(
    sequences,
    *,
    q_heads=4,
    kv_heads=2,
    head_dim=64,
    block_size=16,
    dtype=torch.float32,
    seed=0,
    forget_before=0,
    device="cpu",
):
    """`sequences` are (query length, length) pairs; blocks wholly before the last `forget_before`
    positions that the first query sees are taken out of the table, as a sliding window does."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    counts = [-(-length // block_size) for _, length in sequences]
    order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    cache = torch.full((len(order), 2, kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    table, keys, values = [], [], []
    for (queries, length), count in zip(sequences, counts):
        blocks, order = order[:count], order[count:]
        key, value = random(length, kv_heads, head_dim), random(length, kv_heads, head_dim)
        for position in range(length):
            block, offset = blocks[position // block_size], position % block_size
            cache[block, 0, :, offset] = key[position]
            cache[block, 1, :, offset] = value[position]
        if forget_before:
            first_seen = max(0, length - queries + 1 - forget_before)
            blocks[: first_seen // block_size] = [-1] * (first_seen // block_size)
        table.append(blocks)
        keys.append(key.double().numpy())
        values.append(value.double().numpy())
    query_lengths = [queries for queries, _ in sequences]
    batch = build_batch(
        query_lengths, [length for _, length in sequences], table, block_size=block_size, device=device
    )
    query = random(sum(query_lengths), q_heads, head_dim)
    return Case(query.to(device), cache.to(device), batch, keys, values, query_lengths)


def reference(case, *, scale, window=None, soft_cap=None, alibi_slopes=None, sinks=None):
    """float64 `[tokens, q_heads, head_dim]`, one query and head at a time."""
    query = case.query.cpu().double().numpy()
    out = np.zeros(query.shape)
    token = 0
    for key, value, queries in zip(case.keys, case.values, case.query_lengths):
        for index in range(queries):
            position = len(key) - queries + index
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(query.shape[1]):
                kv_head = head * key.shape[1] // query.shape[1]
                scores = scale * (key[first : position + 1, kv_head] @ query[token, head])
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                if alibi_slopes is not None:
                    scores = scores + float(alibi_slopes[head]) * (np.arange(first, position + 1) - position)
                weights = np.exp(scores)
                total = weights.sum() + (0 if sinks is None else np.exp(float(sinks[head])))
                out[token, head] = weights @ value[first : position + 1, kv_head] / total
            token += 1
    return out


# Largest difference from the float64 reference: the rounding of the result, whose values are below 4,
# and of softmax weights to the cache's type where a kernel multiplies in it.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def assert_close(result, expected):
    assert torch.isfinite(result).all()
    difference = np.abs(result.cpu().double().numpy() - expected).max(initial=0)
    assert difference <= TOLERANCE[result.dtype], f"largest difference {difference:.2e}"
