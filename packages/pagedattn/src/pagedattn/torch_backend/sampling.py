"""Drawing tokens in plain torch: by sorting, where there is something to cut off."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from pagedattn.sampling import BIN, NOT_FINITE, SMALLEST_TEMPERATURE
from pagedattn.torch_backend.philox import gumbel

# With a nucleus to find, this many most likely tokens are sorted first; most often they suffice.
CANDIDATES = 256
# Sorting more than this is no faster than sorting all.
MOST_CANDIDATES = 1024
# Rows are worked on a few at a time, so that passes over them find them in the CPU's cache.
PASS_ELEMENTS = 1 << 18
LEAST = torch.finfo(torch.float32).min


class _Rows(NamedTuple):
    """Logits [n, vocab] in float32, and columns [n, 1] of rows that are drawn together."""

    logits: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor  # vocab where nothing is cut
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor

    def take(self, picked: torch.Tensor) -> _Rows:
        """The rows of a mask [n]."""
        if picked.all():
            return self
        return _Rows(*(part[picked] for part in self))


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
    vocab = logits.shape[1]
    logits = logits.float()
    greedy = temperature < SMALLEST_TEMPERATURE
    limited = (top_k > 0) & (top_k < vocab)
    cut = ~greedy & (limited | (top_p < 1))
    top_k = torch.where(limited, top_k, vocab).long()
    columns = (temperature, top_k, top_p, min_p, seeds, positions)
    rows = _Rows(logits, *(column[:, None] for column in columns))
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for picked, draw in ((greedy, _argmax), (~greedy & ~cut, _draw_uncut), (cut, _draw_cut)):
        if picked.any():
            tokens[picked] = draw(rows.take(picked))
    finite = logits.gather(-1, tokens[:, None])[:, 0].isfinite()
    return tokens.where(finite, NOT_FINITE)


def _argmax(rows: _Rows) -> torch.Tensor:
    tokens = rows.logits.argmax(-1)
    # NaN is torch's largest number.
    if rows.logits.gather(-1, tokens[:, None]).isnan().any():
        return _without_nan(rows.logits).argmax(-1)
    return tokens


def _draw_uncut(rows: _Rows) -> torch.Tensor:
    logits, highest = _highest(rows.logits)
    rows = rows._replace(logits=logits)
    return _draw(rows, highest, _floor(rows, highest))


def _draw_cut(rows: _Rows) -> torch.Tensor:
    """Draw from what top-k and top-p leave: from the most likely tokens, where these reach far enough."""
    vocab = rows.logits.shape[1]
    logits, highest = _highest(rows.logits)
    rows = rows._replace(logits=logits)
    floor = _floor(rows, highest)
    wanted = torch.where(rows.top_k < MOST_CANDIDATES, rows.top_k + 1, CANDIDATES)
    width = min(int(wanted.max()), vocab)
    values, ids = logits.topk(width, dim=-1)
    least = _least_kept(values, highest, floor, rows)
    # Beyond the candidates there may be more of the smallest of them.
    reached = (least > values[:, -1:])[:, 0] | (width == vocab)
    # Where all are -inf the candidates may be any of them, but the lowest is wanted.
    near = reached & ((values >= least).sum(-1) <= CANDIDATES) & (values[:, 0] > -torch.inf)
    if near.all():
        return _draw_from_candidates(values, ids, least, rows)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if near.any():
        tokens[near] = _draw_from_candidates(values[near], ids[near], least[near], rows.take(near))
    short = ~reached
    if short.any():
        far = rows.take(short)
        least[short] = _least_kept(_descending(far.logits), highest[short], floor[short], far)
    tokens[~near] = _draw(rows.take(~near), highest[~near], least[~near])
    return tokens


def _least_kept(
    values: torch.Tensor, highest: torch.Tensor, floor: torch.Tensor, rows: _Rows
) -> torch.Tensor:
    """The least logit [n, 1] kept, of the largest `values` [n, width] in descending order.

    It is the last of them if more may be kept.
    """
    width, vocab = values.shape[1], rows.logits.shape[1]
    kth = values.gather(-1, rows.top_k.clamp(max=width) - 1)
    inside = values >= torch.maximum(kth, floor)
    weights = (values - highest).div_(rows.temperature).exp_().mul_(inside)
    total = weights.sum(-1, keepdim=True)
    beyond = ((rows.top_k >= width) & (rows.top_p < 1))[:, 0]
    if width < vocab and beyond.any():
        wide = rows.take(beyond)
        total[beyond] = _weights(wide, highest[beyond], floor[beyond], vocab)
    before = weights.cumsum(-1) - weights
    kept = inside & ((before < rows.top_p * total) | (rows.top_p >= 1))
    kept[:, 0] = True
    return values.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)


def _draw_from_candidates(
    values: torch.Tensor, ids: torch.Tensor, least: torch.Tensor, rows: _Rows
) -> torch.Tensor:
    """Draw from those of the descending logits `values` [n, width] that are at least `least`."""
    width = int((values >= least).sum(-1).max())
    values, ids = values[:, :width], ids[:, :width]
    scaled = (values - values[:, :1].clamp(min=LEAST)).div_(rows.temperature)
    scaled.masked_fill_(values < least, -torch.inf)
    bins = ids // BIN
    masses = torch.zeros(
        len(values), -(-rows.logits.shape[1] // BIN), dtype=torch.float32, device=values.device
    )
    masses.scatter_add_(1, bins, scaled.exp())
    by_bin = masses.gather(1, bins).double().log_() + gumbel(rows.seeds, rows.positions, 0, bins)
    chosen = bins.gather(-1, by_bin.argmax(-1, keepdim=True))
    by_token = scaled.double() + gumbel(rows.seeds, rows.positions, 1, ids)
    best = by_token.masked_fill_(bins != chosen, -torch.inf).argmax(-1, keepdim=True)
    return ids.gather(-1, best)[:, 0]


def _draw(rows: _Rows, highest: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Draw from all logits that are at least `least` [n, 1]."""
    vocab = rows.logits.shape[1]
    by_bin = _weights(rows, highest, least, BIN).double().log_()
    bin_ids = torch.arange(by_bin.shape[1], device=by_bin.device)[None]
    chosen = (by_bin + gumbel(rows.seeds, rows.positions, 0, bin_ids)).argmax(-1, keepdim=True)
    ids = chosen * BIN + torch.arange(BIN, device=by_bin.device)
    logits = rows.logits.gather(-1, ids.clamp(max=vocab - 1))
    scaled = (logits - highest).div_(rows.temperature).double()
    scaled += gumbel(rows.seeds, rows.positions, 1, ids)
    best = scaled.masked_fill_((logits < least) | (ids >= vocab), -torch.inf).argmax(-1, keepdim=True)
    return ids.gather(-1, best)[:, 0]


def _weights(rows: _Rows, highest: torch.Tensor, least: torch.Tensor, width: int) -> torch.Tensor:
    """The weights of all logits that are at least `least`, added up over `width` tokens at a time."""
    count, vocab = rows.logits.shape
    step = max(1, PASS_ELEMENTS // vocab)
    sums = -(-vocab // width)
    weights = torch.zeros(min(step, count), sums * width, dtype=torch.float32, device=rows.logits.device)
    bounded = bool((least > -torch.inf).any())
    parts = []
    for start in range(0, count, step):
        part = slice(start, start + step)
        logits = rows.logits[part]
        inside = weights[: len(logits), :vocab]
        torch.sub(logits, highest[part], out=inside).div_(rows.temperature[part]).exp_()
        if bounded:
            inside.mul_(logits >= least[part])
        parts.append(weights[: len(logits)].view(-1, sums, width).sum(-1))
    return torch.cat(parts)


def _descending(logits: torch.Tensor) -> torch.Tensor:
    if logits.device.type == "cpu":
        return torch.from_numpy(np.sort(logits.numpy())).flip(-1)  # several times as fast as torch there
    return logits.sort(dim=-1, descending=True).values


def _floor(rows: _Rows, highest: torch.Tensor) -> torch.Tensor:
    """The least logit [n, 1] that min-p keeps."""
    return highest + rows.temperature * rows.min_p.log()


def _highest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits without NaN and +inf, and the largest of each row [n, 1], finite whatever it is."""
    highest = logits.amax(-1, keepdim=True)
    if highest.isfinite().all():
        return logits, highest
    logits = _without_nan(logits)
    return logits, logits.amax(-1, keepdim=True).clamp_(min=LEAST)


def _without_nan(logits: torch.Tensor) -> torch.Tensor:
    return logits.nan_to_num(nan=-torch.inf, posinf=-LEAST, neginf=-torch.inf)
