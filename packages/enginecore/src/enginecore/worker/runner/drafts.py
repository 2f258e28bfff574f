"""Drafts in a step: the batch that verifies them, and the tokens that are accepted."""

from typing import NamedTuple

import numpy as np

from batchsched import StepPlan
from enginecore.executor.step import SampledTokens


def spread_drafts(plan: StepPlan) -> StepPlan:
    """Return `plan` with each draft as a row of the batch by itself: rows repeat, with growing `starts`.

    A draft's position is a sequence of one token that decodes in the row's blocks, with as many tokens of
    context as there are up to it. So it goes through the kernels, CUDA graphs and sampling columns that it
    would go through if it were known. A layer writes the keys and values of all of a step's tokens before it
    reads any, and so those of a draft are there for the ones after it.
    """
    each, number = _each_of(plan.num_drafts + 1)
    known = (plan.counts - plan.num_drafts)[each]
    is_draft = number > 0
    return plan._replace(
        rows=plan.rows[each],
        starts=plan.starts[each] + np.where(is_draft, known + number - 1, 0).astype(np.int32),
        counts=np.where(is_draft, 1, known).astype(np.int32),
        samples=plan.samples[each],
        num_drafts=np.zeros(len(each), np.int32),
        drafts=np.empty(0, np.int32),
    )


def draft_tokens(plan: StepPlan) -> SampledTokens:
    """Return the drafts of a plan with their rows and positions."""
    each, number = _each_of(plan.num_drafts)
    ends = plan.starts + plan.counts - plan.num_drafts
    return SampledTokens(plan.rows[each], (ends[each] + number).astype(np.int32), plan.drafts)


class Accepted(NamedTuple):
    """Tokens sampled in a step with drafts that are their rows' next ones."""

    kept: np.ndarray
    """bool: of the sampled ones, row after row."""
    counts: np.ndarray
    """int32 [rows that sample]: 1, and 1 more for each draft that was sampled."""


def accept(plan: StepPlan, sampled: np.ndarray) -> Accepted:
    """Accept a row's drafts while each is what was sampled in its place, and the token after them.

    `sampled` int32 has the 1 + num_drafts tokens of each of the plan's sampling rows. What is sampled at a
    position depends on the tokens before it and the row's seed alone, so it is what a step without drafts
    samples if those tokens are right.
    """
    num_drafts = plan.num_drafts[plan.samples]
    each, number = _each_of(num_drafts + 1)
    wrong = np.zeros(len(sampled), np.int32)
    followed = number < num_drafts[each]
    wrong[followed] = sampled[followed] != plan.drafts
    before = np.cumsum(wrong) - wrong
    firsts = np.flatnonzero(number == 0)
    kept = before == before[firsts][each]
    return Accepted(kept, np.bincount(each[kept], minlength=len(num_drafts)).astype(np.int32))


def _each_of(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the owner of each of `counts[i]` things and its number among the owner's."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return owners, np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]
