"""Drawing tokens: temperature, min-p, top-k and top-p, each row by settings and a random stream of its own.

**What is kept.** NaN logits count as -inf and +inf as the largest float32. With m the row's largest logit,
a token's scaled logit is s = (logit - m) / temperature and its weight e^s, in float32. Kept are the logits

- that are at least m + temperature · ln(min_p), that is, min_p times as likely as the likeliest;
- that are at least the top_k-th largest;
- that are at least the largest t for which the weights of all logits ≥ t add up to top_p of those of all that
  the first two rules left.

All three are bounds on the logit, so nothing depends on how equal logits are sorted: tokens that tie with the
last one kept are kept too.

**What is drawn.** A token by its weight among those kept, by the Gumbel-max trick (Gumbel 1954; Maddison et
al., https://arxiv.org/abs/1411.0030) in two stages, so that noise is made for few tokens. The vocabulary is
cut into bins of 128 consecutive ids. First the bin b = id // 128 with the largest ln(Σ weights kept in b) +
g(0, b) is taken, then among the kept of that bin the id with the largest s + g(1, id); lowest on ties. The
sums are float32, their logarithms and what follows float64.

**The noise.** g(stage, i) = -ln(-ln(u)), u = (word + ½) / 2³² in float64, where word is the first of the four
32-bit words of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11,
https://doi.org/10.1145/2063384.2063405) for

    key     = (seed mod 2³², seed div 2³²)              seed and position as unsigned 64-bit numbers
    counter = (i, stage, position mod 2³², position div 2³²)

so that a row's draw is a function of its own logits, settings, seed and position, whatever the batch and its
order, and the same in every back end up to the rounding of sums and logarithms.
"""

from __future__ import annotations

import torch

from pagedattn.backends import backend_of

BIN = 128
"""Consecutive token ids that are drawn from together; see above."""

NOT_FINITE = -1
"""In the place of a token id, of a row whose likeliest logit is NaN or infinite."""

SMALLEST_TEMPERATURE = 2.0**-126
"""The smallest normal float32: temperatures below count as 0."""

_COLUMNS = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seeds": torch.int64,
    "positions": torch.int64,
}


def top_k_top_p_sample(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    backend: str | None = None,
) -> torch.Tensor:
    """A token id, or NOT_FINITE, for each row of `logits [n, vocab]`; int64 `[n]`.

    Logits are float32, float16 or bfloat16. The settings are columns `[n]` on the same device, and their
    order is vLLM's:

    - `temperature` float32: 0 takes the largest logit, the lowest id on ties, and ignores the rest;
    - `min_p` float32, 0 … 1: 0 keeps all;
    - `top_k` int32: 0, or vocab and more, keeps all;
    - `top_p` float32, above 0 … 1: 1 keeps all;
    - `seeds` int64, any bits, and `positions` int64: what the draw is made of; see the module.

    A row with no finite logit to choose, or whose choice is +inf, gets NOT_FINITE. On a device nothing waits
    for the columns, so their values are not checked. Raises ValueError when shapes, dtypes or devices do not
    fit together.
    """
    if logits.ndim != 2 or logits.shape[1] == 0 or not logits.is_floating_point():
        raise ValueError(
            f"logits must be floating-point [n, vocab] with a vocab of 1 or more, "
            f"not {logits.dtype} {list(logits.shape)}"
        )
    columns = (temperature, top_k, top_p, min_p, seeds, positions)
    for (name, dtype), column in zip(_COLUMNS.items(), columns):
        if column.shape != logits.shape[:1] or column.dtype != dtype or column.device != logits.device:
            raise ValueError(
                f"{name} must be {dtype} [{logits.shape[0]}] on {logits.device}, "
                f"not {column.dtype} {list(column.shape)} on {column.device}"
            )
    if logits.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    return backend_of(logits.device, backend).top_k_top_p_sample(logits, *columns)
