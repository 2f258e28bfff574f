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
    kv_scales: torch.Tensor | None = None  # of a float8 cache


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
    fp8=False,
    shared_prefix=0,
    device="cpu",
):
    """`sequences` are (query length, length) pairs; blocks wholly before the last `forget_before`
    positions that the first query sees are taken out of the table, as a sliding window does. The first
    `shared_prefix` positions, whole blocks, are the same blocks for all. With `fp8` the cache is
    float8_e4m3fn with a scale a head, and `dtype` the query's."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    kv_scales = torch.rand(2, kv_heads, generator=generator) + 0.01 if fp8 else None

    def random_keys_and_values(length):  # [length, 2, kv_heads, head_dim], as they can be stored
        pairs = random(length, 2, kv_heads, head_dim)
        return (pairs.float() / kv_scales[..., None]).to(torch.float8_e4m3fn).float() if fp8 else pairs

    counts = [-(-length // block_size) for _, length in sequences]
    order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    cache = torch.full((len(order), 2, kv_heads, block_size, head_dim), torch.nan)
    prefix, order = order[: shared_prefix // block_size], order[shared_prefix // block_size :]
    prefix_pairs = random_keys_and_values(shared_prefix)
    table, keys, values = [], [], []
    for (queries, length), count in zip(sequences, counts):
        own = count - len(prefix)
        blocks, order = prefix + order[:own], order[own:]
        pairs = torch.cat((prefix_pairs, random_keys_and_values(length - shared_prefix)))
        for position in range(length):
            block, offset = blocks[position // block_size], position % block_size
            cache[block, :, :, offset] = pairs[position].float()
        if forget_before:
            first_seen = max(0, length - queries + 1 - forget_before)
            blocks[: first_seen // block_size] = [-1] * (first_seen // block_size)
        table.append(blocks)
        if fp8:
            pairs = pairs * kv_scales[..., None]
        keys.append(pairs[:, 0].double().numpy())
        values.append(pairs[:, 1].double().numpy())
    query_lengths = [queries for queries, _ in sequences]
    batch = build_batch(
        query_lengths, [length for _, length in sequences], table, block_size=block_size, device=device
    )
    query = random(sum(query_lengths), q_heads, head_dim)
    cache = cache.to(torch.float8_e4m3fn if fp8 else dtype).to(device)
    scales = None if kv_scales is None else kv_scales.to(device)
    return Case(query.to(device), cache, batch, keys, values, query_lengths, scales)


def reference(case, *, scale, window=None, soft_cap=None, alibi_slopes=None, sinks=None, kv_scales=None):
    """float64 `[tokens, q_heads, head_dim]`, one query and head at a time; the case's keys are scaled."""
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
