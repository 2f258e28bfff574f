"""Draw the next tokens of a batch, each row by its own settings and its own random stream."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from enginecore.executor.step import NOT_FINITE
from enginecore.messages import PositionLogprobs
from enginecore.worker.sampling.processors import apply_constraints, apply_penalties
from enginecore.worker.sampling.state import SamplingState
from pagedattn import top_k_top_p_sample


class Sampled(NamedTuple):
    """Ids or NOT_FINITE, int64 [n] on the device, and log probabilities by index for the rows that asked."""

    tokens: Tensor
    logprobs: dict[int, PositionLogprobs]


def sample(
    logits: Tensor, rows: np.ndarray, lengths: np.ndarray, tokens: Tensor, state: SamplingState
) -> Sampled:
    """Choose a token for each row of logits [n, vocab]; row i holds `lengths[i]` tokens so far.

    `tokens` is int32 [max_rows, max_len]. Log probabilities are those of the model, before any setting
    changes them. The order of the rest is vLLM's: bans and bias, penalties, temperature, min-p, top-k, top-p.
    """
    logits = logits.float()
    asked = np.flatnonzero(state.logprobs[rows] > -2)
    raw = logits[torch.from_numpy(asked)].log_softmax(-1) if len(asked) else None
    if state.constrained:
        apply_constraints(logits, rows, lengths, tokens, state)
    if state.penalised[rows].any():
        apply_penalties(logits, rows, lengths, tokens, state)
    chosen = _choose(logits, rows, lengths, state).clamp(0, logits.shape[-1] - 1)
    # Where all logits are NaN so is the chosen one: to look at it costs nothing.
    finite = logits.gather(-1, chosen[:, None])[:, 0].isfinite()
    tokens = torch.where(finite, chosen, NOT_FINITE)
    return Sampled(tokens, {} if raw is None else _collect(raw, asked, chosen, rows, state))


def position_logprobs(logprobs: Tensor, tokens: Tensor, width: int) -> PositionLogprobs:
    """Return log probabilities of `tokens` [n] and of the `width` likeliest at each position, on the host.

    `logprobs` is float [n, vocab]; a `width` of -1 is the whole vocabulary.
    """
    chosen = logprobs.gather(-1, tokens[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    best = logprobs.topk(logprobs.shape[-1] if width == -1 else min(width, logprobs.shape[-1]), dim=-1)
    ids = torch.cat([tokens[:, None], best.indices], dim=-1)
    values = torch.cat([chosen, best.values], dim=-1)
    return PositionLogprobs(
        ids.to(torch.int32).cpu().numpy(),
        values.float().cpu().numpy(),
        ranks.to(torch.int32).cpu().numpy(),
    )


def _collect(
    raw: Tensor, asked: np.ndarray, tokens: Tensor, rows: np.ndarray, state: SamplingState
) -> dict[int, PositionLogprobs]:
    return {
        index: position_logprobs(
            raw[place : place + 1], tokens[index : index + 1], int(state.logprobs[rows[index]])
        )
        for place, index in enumerate(asked.tolist())
    }


def _choose(logits: Tensor, rows: np.ndarray, lengths: np.ndarray, state: SamplingState) -> Tensor:
    # On a CPU the sampler's own argmax is five times as fast as torch's.
    if logits.device.type != "cpu" and not state.floats["temperature"][rows].any():
        return logits.argmax(-1)
    floats = np.stack([state.floats[name][rows] for name in ("temperature", "top_p", "min_p")])
    numbers = np.stack([state.seed[rows].view(np.int64), lengths.astype(np.int64)])
    temperature, top_p, min_p = torch.from_numpy(floats).to(logits.device, non_blocking=True)
    seeds, positions = torch.from_numpy(numbers).to(logits.device, non_blocking=True)
    return top_k_top_p_sample(
        logits,
        temperature=temperature,
        top_k=torch.from_numpy(state.top_k[rows]).to(logits.device, non_blocking=True),
        top_p=top_p,
        min_p=min_p,
        seeds=seeds,
        positions=positions,
    )
