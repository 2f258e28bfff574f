"""Draw the next tokens of a batch, each row by its own settings and its own random stream."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from enginecore.runner.rows import Rows
from enginecore.runner.step import PositionLogprobs
from enginecore.sampling.processors import apply_extras, apply_penalties

_CANDIDATES = 256
"""With a nucleus to find, this many most likely tokens are sorted first; most often they suffice."""


class Sampled(NamedTuple):
    """Ids int64 [n] on the device, and log probabilities by index for the rows that asked."""

    tokens: Tensor
    logprobs: dict[int, PositionLogprobs]


def sample(logits: Tensor, rows: np.ndarray, lengths: np.ndarray, state: Rows) -> Sampled:
    """Choose a token for each row of logits [n, vocab]; row i holds `lengths[i]` tokens so far.

    Log probabilities are those of the model, before any setting changes them. The order of the rest is
    vLLM's: bans and bias, penalties, temperature, min-p, top-k, top-p.
    """
    logits = logits.float()
    asked = np.flatnonzero(state.logprobs[rows] > -2)
    raw = logits[torch.from_numpy(asked)].log_softmax(-1) if len(asked) else None
    if state.extras:
        apply_extras(logits, rows, lengths, state)
    if state.penalised[rows].any():
        apply_penalties(logits, rows, lengths, state)
    tokens = _choose(logits, rows, lengths, state)
    if raw is None:
        return Sampled(tokens, {})
    return Sampled(tokens, _collect(raw, asked, tokens, rows, state))


def token_logprobs(logprobs: Tensor, tokens: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids and values [n, 1 + width], the given tokens [n] first, and the tokens' ranks [n].

    `logprobs` is float [n, vocab]; a `width` of -1 is the whole vocabulary.
    """
    chosen = logprobs.gather(-1, tokens[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    best = logprobs.topk(logprobs.shape[-1] if width == -1 else min(width, logprobs.shape[-1]), dim=-1)
    ids = torch.cat([tokens[:, None], best.indices], dim=-1)
    return ids, torch.cat([chosen, best.values], dim=-1), ranks


def _collect(
    raw: Tensor, asked: np.ndarray, tokens: Tensor, rows: np.ndarray, state: Rows
) -> dict[int, PositionLogprobs]:
    found = {}
    for place, index in enumerate(asked.tolist()):
        row = int(rows[index])
        parts = token_logprobs(raw[place : place + 1], tokens[index : index + 1], int(state.logprobs[row]))
        ids, values, ranks = (part.cpu().numpy() for part in parts)
        found[index] = PositionLogprobs(row, ids.astype(np.int32), values, ranks.astype(np.int32))
    return found


def _choose(logits: Tensor, rows: np.ndarray, lengths: np.ndarray, state: Rows) -> Tensor:
    temperature = state.floats["temperature"][rows]
    random = np.flatnonzero(temperature > 0)
    if not len(random):
        return logits.argmax(-1)
    filtered = (state.top_k[rows] > 0) | (state.floats["top_p"][rows] < 1)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    groups = [
        (np.flatnonzero(temperature == 0), _argmax),
        (random[~filtered[random]], _draw_from_all),
        (random[filtered[random]], _draw_from_best),
    ]
    for picked, draw in groups:
        if len(picked):
            where = torch.from_numpy(picked).to(logits.device)
            settings = _settings(rows[picked], lengths[picked], state, logits.device)
            tokens[where] = draw(logits[where], settings)
    return tokens


class _Settings(NamedTuple):
    """Columns [n, 1] of the rows that are drawn together."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor
    top_k: Tensor
    max_top_k: int
    """Largest top_k, or 0 when some row has none."""


def _settings(rows: np.ndarray, lengths: np.ndarray, state: Rows, device: torch.device) -> _Settings:
    uniform = _uniform(state.seed[rows], lengths)
    columns = [state.floats[name][rows] for name in ("temperature", "top_p", "min_p")]
    packed = torch.from_numpy(np.stack([*columns, uniform])).to(device, non_blocking=True)[:, :, None]
    top_k = state.top_k[rows]
    widest = int(top_k.max()) if top_k.min() > 0 else 0
    return _Settings(*packed, torch.from_numpy(top_k).to(device, non_blocking=True)[:, None], widest)


def _uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return float32 [n] in [0, 1): a function of each row's seed and position alone.

    The mix is SplitMix64's (Steele, Lea and Flood) over seed and position, so a draw depends on no
    neighbour, no batch and no step, and a resumed request repeats its own.
    """
    with np.errstate(over="ignore"):
        x = _mix(seeds + np.uint64(0x9E3779B97F4A7C15))
        x = _mix(x + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (x >> np.uint64(40)).astype(np.float32) / np.float32(2**24)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _argmax(logits: Tensor, settings: _Settings) -> Tensor:
    return logits.argmax(-1)


def _draw_from_all(logits: Tensor, settings: _Settings) -> Tensor:
    """Draw from the whole vocabulary, less what min-p cuts."""
    probs = (logits / settings.temperature).softmax(-1)
    probs = torch.where(probs >= settings.min_p * probs.amax(-1, keepdim=True), probs, 0)
    return _invert(probs, settings.uniform)


def _draw_from_best(logits: Tensor, settings: _Settings) -> Tensor:
    """Draw from the most likely tokens that top-k and top-p leave."""
    scaled = logits / settings.temperature
    vocab = scaled.shape[-1]
    width = settings.max_top_k or _CANDIDATES
    narrow = logits.device.type == "cpu" and width < vocab
    if narrow:
        values, ids = scaled.topk(width, dim=-1)
        probs, covered = _nucleus(values, scaled, settings)
        if bool(covered.all()):
            return ids.gather(-1, _invert(probs, settings.uniform)[:, None])[:, 0]
    values, ids = scaled.sort(dim=-1, descending=True)
    probs, _ = _nucleus(values, scaled, settings)
    return ids.gather(-1, _invert(probs, settings.uniform)[:, None])[:, 0]


def _nucleus(values: Tensor, scaled: Tensor, settings: _Settings) -> tuple[Tensor, Tensor]:
    """Return the probabilities that min-p, top-k and top-p leave of the sorted `values` [n, k].

    The second result [n] tells whether `values` reach as far as the row's nucleus does.
    """
    floor = values[:, :1] + settings.min_p.log()
    limited = settings.top_k > 0
    within = ~limited | (torch.arange(values.shape[-1], device=values.device) < settings.top_k)
    kept = torch.where(within & (values >= floor), values, -torch.inf)
    everything = torch.where(scaled >= floor, scaled, -torch.inf).logsumexp(-1)
    total = torch.where(limited[:, 0], kept.logsumexp(-1), everything)
    probs = (kept - total[:, None]).exp()
    before = probs.cumsum(-1) - probs
    covered = (limited & (settings.top_k <= values.shape[-1]))[:, 0] | (probs.sum(-1) >= settings.top_p[:, 0])
    return torch.where(before < settings.top_p, probs, 0), covered


def _invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the index [n] at which the cumulative sum of unnormalised probs [n, k] passes uniform [n, 1].

    The target stays below the whole sum, so that rounding never picks a token of probability zero.
    """
    reached = probs.cumsum(-1)
    total = reached[:, -1:]
    target = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(reached, target, right=True)[:, 0].clamp_(max=probs.shape[-1] - 1)
