"""Counter-based random numbers in plain torch."""

from __future__ import annotations

import torch

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, stage: int, indices: torch.Tensor) -> torch.Tensor:
    """The noise of `pagedattn.sampling`: float64 [n, k] for int64 `seeds` and `positions` [n, 1].

    `indices` is int64 [n, k] or [1, k].
    """
    key = (seeds & MASK, (seeds >> 32) & MASK)
    counter = (indices, torch.full_like(seeds, stage), positions & MASK, (positions >> 32) & MASK)
    uniform = (philox(counter, key)[0].double() + 0.5) * 2.0**-32
    return uniform.log_().neg_().log_().neg_()


def philox(
    counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10 (see `pagedattn.sampling`): four words from a counter of four and a key of two.

    Words are int64 tensors of values below 2³² that broadcast. Products wrap at 2⁶⁴ to negative numbers,
    of which the masks take the right bits.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product2 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = ((product2 >> 32) ^ c1 ^ k0) & MASK
        c2 = ((product0 >> 32) ^ c3 ^ k1) & MASK
        c1, c3 = product2 & MASK, product0 & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3
