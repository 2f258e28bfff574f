"""Runs the Triton kernels around attention in Triton's interpreter; differences from numpy, as JSON.

A program of its own, since TRITON_INTERPRET must be set before Triton is imported. Each report is the
largest difference from float64 arithmetic in units of what rounding to the result's type may cost, so that
1 is just right; that of sampling is the share of rows that drew another token than the definition says.
"""

import json
import math
import sys
from itertools import pairwise

import numpy as np
import torch
from sampling_reference import draw

from pagedattn import (
    NOT_FINITE,
    apply_token_bitmask,
    copy_blocks,
    gelu_and_mul,
    grouped_linear,
    grouped_matmul,
    pack_experts,
    rms_norm,
    rotary,
    silu_and_mul,
    top_k_top_p_sample,
)

SINGLE, HALF, BFLOAT = torch.float32, torch.float16, torch.bfloat16
ROUNDING = {SINGLE: 2e-6, HALF: 1e-3, BFLOAT: 8e-3}


def random(*shape, dtype=SINGLE):
    return torch.randn(shape).to(dtype)


def difference(result, expected):
    """The largest, over what rounding allows to numbers of that size."""
    if not torch.isfinite(result).all() or tuple(result.shape) != expected.shape:
        return math.inf
    error = np.abs(result.double().numpy() - expected) / (np.abs(expected) + 0.5)
    return error.max(initial=0) / ROUNDING[result.dtype]


def run_norm(shape, dtype, weight_dtype, *, residual=False, slice_of=0):
    """With `slice_of`, x is cut from a tensor that is that much wider."""
    x = random(*shape[:-1], shape[-1] + slice_of, dtype=dtype)[..., slice_of:]
    weight, added = random(shape[-1], dtype=weight_dtype), random(*shape, dtype=dtype)
    if residual:
        normed, total = rms_norm(x, weight, 1e-5, added, backend="triton")
        if difference(total, x.double().numpy() + added.double().numpy()) > 1:
            return math.inf
        x = total
    else:
        normed = rms_norm(x, weight, 1e-5, backend="triton")
    x = x.double().numpy()
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight.double().numpy()
    return difference(normed, expected)


def run_norm_of_unlike_strides():
    """x is a slice of wider rows, the residual a transpose."""
    x, added = random(4, 3, 40)[..., 8:], random(32, 3, 4).transpose(0, 2)
    normed, total = rms_norm(x, torch.ones(32), 1e-5, added, backend="triton")
    if not torch.equal(total, x + added):
        return math.inf
    total = total.double().numpy()
    return difference(normed, total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-5))


def turned(x, angles, half, interleaved):
    """`x [tokens, heads, head_dim]` as complex numbers, by `angles [tokens, half]`."""
    x = x.double().numpy().copy()
    first = np.arange(half) * 2 if interleaved else np.arange(half)
    second = first + 1 if interleaved else first + half
    numbers = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)[:, None]
    x[..., first], x[..., second] = numbers.real, numbers.imag
    return x


def run_rotary(heads, head_dim, half, dtype, *, interleaved=False, positions=None):
    """Queries and keys are slices of one fused projection."""
    query_heads, key_heads = heads
    fused = random(5, query_heads + 2 * key_heads, head_dim, dtype=dtype)
    query, key = fused[:, :query_heads], fused[:, query_heads : query_heads + key_heads]
    angles = np.random.default_rng(0).uniform(0, 6, (9, half))
    cos_sin = torch.from_numpy(np.concatenate((np.cos(angles), np.sin(angles)), axis=1)).float()
    if positions is None:
        cos_sin, angles = cos_sin[:5], angles[:5]
    else:
        angles = angles[positions.numpy()]
    results = rotary(query, key, positions, cos_sin, interleaved, backend="triton")
    return max(
        difference(result, turned(x, angles, half, interleaved)) for result, x in zip(results, (query, key))
    )


def run_gated(function, weigh, shape, dtype):
    x = random(*shape, dtype=dtype) * 3
    gate, up = np.split(x.double().numpy(), 2, axis=-1)
    return difference(function(x), gate * np.vectorize(weigh)(gate) * up)


def run_grouped(starts, dtype, in_size, out_size, starts_dtype=torch.int32):
    x = random(starts[-1], in_size, dtype=dtype)
    weight = random(len(starts) - 1, out_size, in_size, dtype=dtype) / in_size**0.5
    result = grouped_matmul(x, weight, torch.tensor(starts, dtype=starts_dtype), backend="triton")
    expected = np.zeros((starts[-1], out_size))
    for expert, (start, stop) in enumerate(pairwise(starts)):
        expected[start:stop] = x[start:stop].double().numpy() @ weight[expert].double().numpy().T
    return difference(result, expected)


def run_grouped_linear(starts, dtype, weight_dtype, in_size, out_size):
    rows = starts[-1]
    x, index = random(rows, in_size, dtype=dtype), torch.arange(rows, dtype=torch.int32).flip(0)
    weight = random(len(starts) - 1, out_size, in_size, dtype=weight_dtype) / in_size**0.5
    packed = pack_experts(weight, backend="triton")
    result = grouped_linear(x, packed, torch.tensor(starts, dtype=torch.int32), index, backend="triton")
    taken, expected = x.flip(0).double().numpy(), np.zeros((rows, out_size))
    for expert, (start, stop) in enumerate(pairwise(starts)):
        expected[start:stop] = taken[start:stop] @ weight[expert].double().numpy().T
    return difference(result, expected)


def run_copies(dtype, head_dim, pairs, *, same=False):
    source = random(2, 6, 2, 2, 4, head_dim).to(dtype)
    target = source if same else random(2, 5, 2, 2, 4, head_dim).to(dtype)
    expected, before = target.view(torch.uint8).clone(), source.view(torch.uint8).clone()
    for origin, place in pairs:
        expected[:, place] = before[:, origin]
    copy_blocks(source, target, torch.tensor(pairs), backend="triton")
    return 0 if torch.equal(target.view(torch.uint8), expected) else math.inf


def run_sampling(vocab, settings, *, rows=24, dtype=SINGLE, logits=None):
    if logits is None:
        logits = random(rows, vocab) * 2.5
    logits = logits.to(dtype)
    settings = [settings[i % len(settings)] for i in range(len(logits))]
    seeds = np.random.default_rng(1).integers(-(2**63), 2**63, len(logits))
    positions = np.random.default_rng(2).integers(0, 2**40, len(logits))

    def column(name, default, kind):
        return torch.tensor([row.get(name, default) for row in settings], dtype=kind)

    tokens = top_k_top_p_sample(
        logits,
        temperature=column("temperature", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int32),
        top_p=column("top_p", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        seeds=torch.from_numpy(seeds),
        positions=torch.from_numpy(positions),
        backend="triton",
    )
    expected = [
        int(np.argmax(row)) if kept["temperature"] == 0 else draw(row, **kept, seed=seed, position=position)
        for row, kept, seed, position in zip(logits.double().numpy(), settings, seeds, positions)
    ]
    return float(np.mean(tokens.numpy() != np.array(expected)))


def run_sampling_of_no_numbers():
    """What there is to draw from is one token; the share of rows that drew another."""
    logits = torch.full((5, 300), -torch.inf)
    logits[1, 299], logits[2], logits[3, 150], logits[4, :299], logits[4, 299] = (
        -5,
        torch.nan,
        5,
        torch.nan,
        1,
    )
    logits[3, 150] = torch.inf
    wrong = 0
    for settings in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}):
        columns = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0} | settings
        tokens = top_k_top_p_sample(
            logits,
            **{name: torch.full((5,), columns[name]) for name in ("temperature", "top_p", "min_p")},
            top_k=torch.full((5,), settings.get("top_k", 0), dtype=torch.int32),
            seeds=torch.arange(5),
            positions=torch.arange(5),
            backend="triton",
        )
        wrong += (tokens != torch.tensor([NOT_FINITE, 299, NOT_FINITE, NOT_FINITE, 299])).sum().item()
    return wrong / 25


def run_bitmask(vocab, dtype, rows=None):
    """The share of logits that differ from those of the torch back end."""
    logits = random(5, vocab).to(dtype)
    expected = logits.clone()
    count = 5 if rows is None else len(rows)
    words = torch.randint(-(2**31), 2**31, (count, -(-vocab // 32)), dtype=torch.int64).to(torch.int32)
    listed = None if rows is None else torch.tensor(rows)
    apply_token_bitmask(expected, words, listed, backend="torch")
    apply_token_bitmask(logits, words, listed, backend="triton")
    return (logits != expected).double().mean().item()


def sigmoid(gate):
    return 1 / (1 + math.exp(-gate))


def gelu_tanh(gate):
    return (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2


def gelu_erf(gate):
    return (1 + math.erf(gate / math.sqrt(2))) / 2


MIXED = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 50, "top_p": 0.7, "min_p": 0.01},
    {"temperature": 5.0, "top_p": 0.999},
    {"temperature": 1.0, "top_k": 1},
]
TIED = torch.full((30, 400), -20.0)
TIED[:, [3, 150, 151, 390]] = -5


def main():
    torch.manual_seed(0)
    silu, tanh, erf = (
        lambda x: silu_and_mul(x, backend="triton"),
        lambda x: gelu_and_mul(x, backend="triton"),
        lambda x: gelu_and_mul(x, "none", backend="triton"),
    )
    reports = {
        "norm": run_norm((7, 96), SINGLE, SINGLE),
        "norm fp16": run_norm((7, 576), HALF, HALF),
        "norm bf16": run_norm((7, 576), BFLOAT, BFLOAT),
        "norm of heads in a fused projection": run_norm((5, 9, 64), SINGLE, SINGLE, slice_of=32),
        "norm of one row": run_norm((64,), SINGLE, SINGLE),
        "norm of four dimensions": run_norm((2, 3, 5, 24), SINGLE, SINGLE),
        "norm of no rows": run_norm((0, 24), SINGLE, SINGLE),
        "norm wider than a tile": run_norm((3, 5000), SINGLE, SINGLE),
        "norm and residual": run_norm((7, 96), SINGLE, SINGLE, residual=True),
        "norm and residual fp16": run_norm((3, 5, 96), HALF, SINGLE, residual=True, slice_of=8),
        "norm and residual bf16": run_norm((40, 64), BFLOAT, SINGLE, residual=True),
        "norm and residual of unlike strides": run_norm_of_unlike_strides(),
        "rotary": run_rotary((4, 2), 64, 32, SINGLE),
        "rotary fp16": run_rotary((4, 2), 64, 32, HALF),
        "rotary bf16 interleaved": run_rotary((4, 2), 64, 32, BFLOAT, interleaved=True),
        "rotary by positions": run_rotary((4, 2), 64, 32, SINGLE, positions=torch.tensor([8, 0, 3, 3, 1])),
        "rotary by int32 positions": run_rotary(
            (4, 2), 64, 32, SINGLE, positions=torch.tensor([8, 0, 3, 3, 1], dtype=torch.int32)
        ),
        "rotary, a part": run_rotary((3, 1), 80, 20, SINGLE),
        "rotary, a part interleaved": run_rotary((3, 1), 80, 10, SINGLE, interleaved=True),
        "rotary of many heads": run_rotary((71, 1), 64, 32, SINGLE),
        "silu": run_gated(silu, sigmoid, (5, 96), SINGLE),
        "silu fp16": run_gated(silu, sigmoid, (2, 3, 3000), HALF),
        "silu bf16": run_gated(silu, sigmoid, (4, 64), BFLOAT),
        "gelu tanh": run_gated(tanh, gelu_tanh, (5, 96), SINGLE),
        "gelu erf": run_gated(erf, gelu_erf, (5, 96), SINGLE),
        "grouped": run_grouped([0, 3, 3, 4, 11], SINGLE, 48, 33),
        "grouped int64 starts": run_grouped([0, 3, 3, 4, 11], SINGLE, 48, 33, torch.int64),
        "grouped fp16": run_grouped([0, 0, 20, 20, 21, 40], HALF, 200, 130),
        "grouped, an expert's tiles": run_grouped([0, 150, 150, 151], SINGLE, 40, 70),
        "grouped fp16, an expert's tiles": run_grouped([0, 1, 300], HALF, 70, 140),
        "grouped linear": run_grouped_linear([0, 3, 3, 4, 11], SINGLE, SINGLE, 48, 33),
        "grouped linear, narrow weights": run_grouped_linear([0, 5, 9], SINGLE, BFLOAT, 40, 33),
        "copies": run_copies(SINGLE, 6, [[5, 0], [2, 4], [2, 1]]),
        "copies bf16": run_copies(BFLOAT, 64, [[5, 0], [2, 4], [2, 1]]),
        "copies fp8": run_copies(torch.float8_e4m3fn, 3, [[0, 0], [3, 2]]),
        "copies within a cache": run_copies(HALF, 8, [[0, 1], [3, 2]], same=True),
        "copies in a chain": run_copies(HALF, 8, [[0, 1], [1, 2], [2, 0], [5, 4]], same=True),
        "sampling": run_sampling(333, MIXED),
        "sampling fp16": run_sampling(333, MIXED, dtype=HALF),
        "sampling bf16": run_sampling(1000, MIXED, dtype=BFLOAT),
        "sampling of many": run_sampling(9000, MIXED, rows=8),
        "sampling of one": run_sampling(1, MIXED),
        "sampling of low logits": run_sampling(200, MIXED, logits=random(24, 200) * 1e30 - 3e38),
        "sampling of ties": run_sampling(400, [{"temperature": 1.0, "top_k": 2}], logits=TIED),
        "sampling of no numbers": run_sampling_of_no_numbers(),
        "bitmask": run_bitmask(5000, SINGLE, [4, 0, 2]),
        "bitmask fp16": run_bitmask(33, HALF),
        "bitmask bf16": run_bitmask(1, BFLOAT, [3]),
    }
    json.dump(reports, sys.stdout)


if __name__ == "__main__":
    main()
