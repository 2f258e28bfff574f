"""Allowed ids, bans and biases: what a request says of single tokens, as columns over a batch.

A ban is an id that may not come: the last token of a bad word, once the others are there, or an id that would
end the request before its minimum length.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from enginecore.messages import RowSampling
from enginecore.worker.upload import upload_floats, upload_integers

ALWAYS = 2**31 - 1
"""More tokens than a request generates."""


class RowConstraints(NamedTuple):
    """Constraints of one row, int32; made once, when the row is admitted."""

    until: int
    """Number of generated tokens from which on nothing of this applies any more."""
    allowed: np.ndarray
    """[a]: the only ids that may come; none for no such rule."""
    bans: np.ndarray
    """[3, b]: id, how many tokens must come before it, and from how many generated ones on it may come."""
    contexts: np.ndarray
    """[sum of bans[1]]: the tokens that must come before, of one ban after the other."""
    biased: np.ndarray
    """[c]: ids, each once."""
    biases: np.ndarray
    """float32 [c]."""

    @classmethod
    def of(cls, sampling: RowSampling) -> "RowConstraints | None":
        """Return the constraints in a request's parameters, None if there are none."""
        params, words = sampling.params, sampling.bad_words
        # A grammar's masks see to the minimum length themselves.
        stops = sampling.stop_ids if params.min_tokens and sampling.guide is None else []
        bias = params.logit_bias or {}
        lasts = bool(words or bias or params.allowed_token_ids)
        if not (lasts or stops):
            return None
        bans = [(word[-1], len(word) - 1, ALWAYS) for word in words]
        bans += [(token, 0, params.min_tokens) for token in stops]
        return cls(
            ALWAYS if lasts else min(params.min_tokens, ALWAYS),
            np.array(params.allowed_token_ids or [], np.int32),
            np.array(bans, np.int64).clip(max=ALWAYS).astype(np.int32).reshape(-1, 3).T,
            np.array([token for word in words for token in word[:-1]], np.int32),
            np.array(list(bias), np.int32),
            np.array(list(bias.values()), np.float32),
        )


class Allowed(NamedTuple):
    """Rows that may have some ids only; int64."""

    rows: Tensor
    """[k]: their places in the logits."""
    places: Tensor
    """[a]: the place of each allowed id's row."""
    ids: Tensor
    """[a]."""

    def apply(self, logits: Tensor) -> None:
        kept = logits[self.places, self.ids]
        logits.index_fill_(0, self.rows, -torch.inf)
        logits[self.places, self.ids] = kept


class Bans(NamedTuple):
    """Bans of a batch; int64."""

    indices: Tensor
    """[b]: the row among those that sample."""
    before: Tensor
    """[b]: how many tokens must come before."""
    until: Tensor
    """[b]: from how many generated tokens on the ban does not apply."""
    num_prompt: Tensor
    """[b]."""
    targets: Tensor
    """[b]: which of the targets is banned."""
    places: Tensor
    """[t]: the place in the logits of each target's row."""
    ids: Tensor
    """[t]: its id; no other target is the same id of the same row."""
    bans: Tensor
    """[c]: the ban of each token that must come before."""
    rows: Tensor
    """[c]: its row among all tokens."""
    back: Tensor
    """[c]: how many tokens before the end it stands, 1 for the last."""
    context: Tensor
    """[c]: the token."""

    def apply(self, logits: Tensor, lengths: Tensor, tokens: Tensor) -> None:
        length = lengths[self.indices]
        generated = length - self.num_prompt
        active = (self.before <= generated) & (generated < self.until)
        if len(self.context):
            positions = (length[self.bans] - self.back).clamp_(min=0)
            differs = tokens[self.rows, positions] != self.context
            differing = torch.zeros_like(self.before).index_add_(0, self.bans, differs.long())
            active &= differing == 0
        hits = torch.zeros_like(self.ids).index_add_(0, self.targets, active.long())
        values = logits[self.places, self.ids]
        logits[self.places, self.ids] = values.masked_fill_(hits > 0, -torch.inf)


class Biases(NamedTuple):
    """Biases of a batch: place in the logits and id, int64, and bias, float32; [c], no id of a row twice."""

    places: Tensor
    ids: Tensor
    biases: Tensor

    def apply(self, logits: Tensor) -> None:
        logits[self.places, self.ids] = logits[self.places, self.ids] + self.biases


class ConstraintColumns(NamedTuple):
    """Constraints of a batch, on its device."""

    allowed: Allowed | None
    bans: Bans | None
    biases: Biases | None

    @classmethod
    def join(
        cls,
        parts: Sequence[RowConstraints],
        index: np.ndarray,
        places: np.ndarray,
        rows: np.ndarray,
        num_prompt: np.ndarray,
        device: torch.device,
    ) -> "ConstraintColumns":
        """Join the constraints of some rows, `parts`.

        Of each, int[k]: `index`, which it is of the rows that sample; `places`, which of those whose logits
        are changed; `rows`, which of all; and its `num_prompt`.
        """
        return cls(
            _join_allowed(parts, places, device),
            _join_bans(parts, index, places, rows, num_prompt, device),
            _join_biases(parts, places, device),
        )

    def apply(self, logits: Tensor, lengths: Tensor, tokens: Tensor) -> None:
        """Apply all to logits float32 [m, vocab], in place.

        `lengths` int64 [n] is the number of tokens that each row holds which samples, `tokens` int32
        [max_rows, max_len] are those of all rows.
        """
        if self.allowed is not None:
            self.allowed.apply(logits)
        if self.bans is not None:
            self.bans.apply(logits, lengths, tokens)
        if self.biases is not None:
            self.biases.apply(logits)


def _join_allowed(
    parts: Sequence[RowConstraints], places: np.ndarray, device: torch.device
) -> Allowed | None:
    counts = np.array([len(part.allowed) for part in parts])
    if not counts.any():
        return None
    ids = np.concatenate([part.allowed for part in parts])
    return Allowed(*upload_integers([places[counts > 0], places.repeat(counts), ids], device))


def _join_bans(
    parts: Sequence[RowConstraints],
    index: np.ndarray,
    places: np.ndarray,
    rows: np.ndarray,
    num_prompt: np.ndarray,
    device: torch.device,
) -> Bans | None:
    counts = np.array([part.bans.shape[1] for part in parts])
    if not counts.any():
        return None
    ids, before, until = np.concatenate([part.bans for part in parts], axis=1)
    both = places.repeat(counts).astype(np.int64) << 32 | ids
    targets, target = np.unique(both, return_inverse=True)
    ban = np.arange(len(ids)).repeat(before)
    # From the end backwards: the first of k tokens stands k tokens before it.
    back = np.cumsum(before)[ban] - np.arange(len(ban))
    context = np.concatenate([part.contexts for part in parts])
    columns = [index.repeat(counts), before, until, num_prompt.repeat(counts), target]
    columns += [targets >> 32, targets & ALWAYS, ban, rows.repeat(counts)[ban], back, context]
    return Bans(*upload_integers(columns, device))


def _join_biases(parts: Sequence[RowConstraints], places: np.ndarray, device: torch.device) -> Biases | None:
    counts = np.array([len(part.biased) for part in parts])
    if not counts.any():
        return None
    ids = np.concatenate([part.biased for part in parts])
    (biases,) = upload_floats([np.concatenate([part.biases for part in parts])], device)
    return Biases(*upload_integers([places.repeat(counts), ids], device), biases)
