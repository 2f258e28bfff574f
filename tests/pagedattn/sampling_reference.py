"""An oracle for sampling: its definition in numpy, with Philox in Python's integers."""

import math

import numpy as np


def philox(counter, key):
    """Philox4x32-10, word for word as in Salmon et al."""
    counter, key = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            second >> 32 ^ counter[1] ^ key[0],
            second & 0xFFFFFFFF,
            first >> 32 ^ counter[3] ^ key[1],
            first & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def gumbel(seed, position, stage, index):
    seed, position = int(seed) % 2**64, int(position) % 2**64
    counter = (int(index), stage, position % 2**32, position >> 32)
    return -math.log(-math.log((philox(counter, (seed % 2**32, seed >> 32))[0] + 0.5) / 2**32))


def weights(logits, *, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """float64 [vocab]: weights of the kept tokens, 0 of the others."""
    logits = np.asarray(logits, np.float64)
    highest = logits.max()
    with np.errstate(divide="ignore", over="ignore"):
        kept = logits >= highest + temperature * np.log(min_p)
        mass = np.exp((logits - highest) / temperature)
    if 0 < top_k < len(logits):
        kept &= logits >= np.sort(logits)[-top_k]
    if top_p < 1:
        goal = top_p * mass[kept].sum()
        least = next(t for t in np.unique(logits)[::-1] if mass[kept & (logits >= t)].sum() >= goal)
        kept &= logits >= least
    return np.where(kept, mass, 0)


def draw(logits, *, seed, position, **settings):
    """The token that a row draws."""
    mass = weights(logits, **settings)
    bins = [math.fsum(mass[first : first + 128]) for first in range(0, len(mass), 128)]
    scores = [
        math.log(each) + gumbel(seed, position, 0, i) if each else -math.inf for i, each in enumerate(bins)
    ]
    first = int(np.argmax(scores)) * 128
    tokens = [
        math.log(mass[i]) + gumbel(seed, position, 1, i) if mass[i] else -math.inf
        for i in range(first, min(first + 128, len(mass)))
    ]
    return first + int(np.argmax(tokens))
