# ruff: noqa: ANN001, ANN201 (Triton infers the types of kernel arguments)
"""Drawing tokens in one Triton launch, without sorting and without waiting for the device.

`pagedattn.sampling` says what is drawn. Bounds on the logit are found by their bits, two at a time from the
highest on: floats in ascending order are integers in ascending order once negative ones are mirrored.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pagedattn import sampling
from pagedattn.sampling import BIN, SMALLEST_TEMPERATURE

TILE = 4096
LARGEST = tl.constexpr(3.4028234663852886e38)
NOT_FINITE = tl.constexpr(sampling.NOT_FINITE)


@triton.jit
def load_logits(row, first, vocab, TILE: tl.constexpr):
    """float32 logits `first` … of a row: NaN as -inf, +inf as the largest number, and -inf at the end."""
    token = first + tl.arange(0, TILE)
    logits = tl.load(row + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
    logits = tl.where(logits != logits, -float("inf"), logits)
    return tl.minimum(logits, LARGEST)


@triton.jit
def find_highest(row, vocab, TILE: tl.constexpr):
    """The largest logit of a row and the lowest token that has it."""
    highest = tl.full([TILE], -float("inf"), tl.float32)
    tokens = tl.arange(0, TILE)
    for first in range(0, vocab, TILE):
        logits = load_logits(row, first, vocab, TILE)
        higher = logits > highest
        highest = tl.where(higher, logits, highest)
        tokens = tl.where(higher, first + tl.arange(0, TILE), tokens)
    best = tl.max(highest, axis=0)
    return best, tl.min(tl.where(highest == best, tokens, 2147483647), axis=0)


@triton.jit
def from_ordered(bits):
    """The float32 that is the `bits`-th of all (an int64 scalar), from -NaN and -inf up to +NaN."""
    mirrored = tl.where(bits >= 0x80000000, bits - 0x80000000, 0xFFFFFFFF - bits)
    return mirrored.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def softmax_weights(logits, highest, rate, least, BY_COUNT: tl.constexpr):
    """Weights of the logits of at least `least`, 0 for the others; or 1 each with BY_COUNT."""
    if BY_COUNT:
        return tl.where(logits >= least, 1.0, 0.0)
    return tl.where(logits >= least, tl.exp((logits - highest) * rate), 0.0)


@triton.jit
def find_bound(row, vocab, highest, rate, least, goal, BY_COUNT: tl.constexpr, TILE: tl.constexpr):
    """The largest bound for which the weights of logits ≥ max(bound, `least`) add up to `goal` or more."""
    bound = tl.full([], 0, tl.int64)
    shift = tl.full([], 30, tl.int64)
    for _ in range(16):
        step = tl.full([], 1, tl.int64) << shift
        bound1 = from_ordered(bound + step)
        bound2 = from_ordered(bound + 2 * step)
        bound3 = from_ordered(bound + 3 * step)
        weight1 = tl.zeros([TILE], tl.float32)
        weight2 = tl.zeros([TILE], tl.float32)
        weight3 = tl.zeros([TILE], tl.float32)
        for first in range(0, vocab, TILE):
            logits = load_logits(row, first, vocab, TILE)
            weights = softmax_weights(logits, highest, rate, least, BY_COUNT)
            weight1 += tl.where(logits >= bound1, weights, 0.0)
            weight2 += tl.where(logits >= bound2, weights, 0.0)
            weight3 += tl.where(logits >= bound3, weights, 0.0)
        bound += tl.where(tl.sum(weight1, axis=0) >= goal, step, 0)
        bound += tl.where(tl.sum(weight2, axis=0) >= goal, step, 0)
        bound += tl.where(tl.sum(weight3, axis=0) >= goal, step, 0)
        shift -= 2
    found = from_ordered(bound)
    # Below -inf are only the bits of NaN: nothing reaches the goal, so all is kept.
    return tl.where(found != found, -float("inf"), found)


@triton.jit
def gumbel(seed, position, stage, index):
    """The noise of `pagedattn.sampling`, float64, for int32 `index`."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = index * 0
    word, _, _, _ = tl.philox(
        seed, index.to(tl.uint32), (zero + stage).to(tl.uint32), zero + low, zero + high
    )
    return -tl.log(-tl.log((word.to(tl.float64) + 0.5) * 2.3283064365386963e-10))


@triton.jit
def store_finite(to, row, token):
    """Store `token`, or NOT_FINITE where its logit is NaN or infinite."""
    logit = tl.load(row + token).to(tl.float32)
    tl.store(to, tl.where(tl.abs(logit) <= LARGEST, token.to(tl.int64), NOT_FINITE))


@triton.jit(do_not_specialize=["vocab"])
def sample_kernel(
    tokens,
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    vocab,
    stride,
    SMALLEST_TEMPERATURE: tl.constexpr,
    BIN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (rows)."""
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * stride
    highest, best_token = find_highest(row, vocab, TILE)
    degree = tl.load(temperature + number)
    if degree < SMALLEST_TEMPERATURE:
        store_finite(tokens + number, row, best_token)
        return
    highest = tl.maximum(highest, -LARGEST)
    rate = 1.0 / degree
    least = highest + degree * tl.log(tl.load(min_p + number))
    count = tl.load(top_k + number)
    if (count > 0) & (count < vocab):
        kth = find_bound(row, vocab, highest, rate, -float("inf"), count.to(tl.float32), True, TILE)
        least = tl.maximum(least, kth)
    share = tl.load(top_p + number)
    if share < 1.0:
        weights = tl.zeros([TILE], tl.float32)
        for first in range(0, vocab, TILE):
            weights += softmax_weights(load_logits(row, first, vocab, TILE), highest, rate, least, False)
        goal = share * tl.sum(weights, axis=0)
        least = tl.maximum(least, find_bound(row, vocab, highest, rate, least, goal, False, TILE))

    seed, position = tl.load(seeds + number), tl.load(positions + number)
    best_score = tl.full([TILE // BIN], -float("inf"), tl.float64)
    best_bin = tl.arange(0, TILE // BIN)
    for first in range(0, vocab, TILE):
        weights = softmax_weights(load_logits(row, first, vocab, TILE), highest, rate, least, False)
        by_bin = tl.sum(tl.reshape(weights, [TILE // BIN, BIN]), axis=1)
        bins = first // BIN + tl.arange(0, TILE // BIN)
        score = tl.log(by_bin.to(tl.float64)) + gumbel(seed, position, 0, bins)
        better = score > best_score
        best_score = tl.where(better, score, best_score)
        best_bin = tl.where(better, bins, best_bin)
    top = tl.max(best_score, axis=0)
    first = tl.min(tl.where(best_score == top, best_bin, 2147483647), axis=0) * BIN
    token = first + tl.arange(0, BIN)
    drawn = load_logits(row, first, vocab, BIN)
    score = tl.div_rn(drawn - highest, degree).to(tl.float64) + gumbel(seed, position, 1, token)
    score = tl.where((drawn >= least) & (token < vocab), score, -float("inf"))
    best = tl.min(tl.where(score == tl.max(score, axis=0), token, 2147483647), axis=0)
    store_finite(tokens + number, row, best)


def top_k_top_p_sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """See `pagedattn.top_k_top_p_sample`."""
    count, vocab = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    tile = max(BIN, min(TILE, triton.next_power_of_2(vocab)))
    constants: dict[str, Any] = {
        "SMALLEST_TEMPERATURE": SMALLEST_TEMPERATURE,
        "BIN": BIN,
        "TILE": tile,
        "num_warps": max(1, min(16, tile // 256)),
    }
    with torch.cuda.device_of(logits):
        sample_kernel[(count,)](
            tokens,
            logits,
            temperature.contiguous(),
            top_k.contiguous(),
            top_p.contiguous(),
            min_p.contiguous(),
            seeds.contiguous(),
            positions.contiguous(),
            vocab,
            logits.stride(0),
            **constants,
        )
    return tokens
