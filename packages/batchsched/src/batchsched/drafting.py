"""Draft tokens on their way into rows."""

import numpy as np
from numpy.typing import ArrayLike

from batchsched.rows import Rows


def draft(rows: Rows, which: ArrayLike, tokens: ArrayLike, counts: ArrayLike | None) -> None:
    """Give the rows `which` their drafts; see `Scheduler.draft`. Raises ValueError, with nothing changed."""
    given = np.asarray(which, np.intp)
    ids = np.asarray(tokens, np.int32)
    if given.ndim != 1 or ids.ndim != 2 or len(ids) != given.size:
        raise ValueError(f"drafts of {given.size} rows are [{given.size}, k], not {list(ids.shape)}")
    width = ids.shape[1]
    wanted = np.full(given.size, width, np.int32) if counts is None else np.asarray(counts, np.int32)
    if wanted.shape != given.shape or (wanted < 0).any() or (wanted > width).any():
        raise ValueError(f"counts of {given.size} rows are from 0 to {width} each, not {wanted.tolist()}")
    lives = rows.in_line[given]
    given, ids, wanted = given[lives], ids[lives], wanted[lives]
    many = given[wanted > rows.max_drafts[given]]
    if many.size:
        raise ValueError(f"rows {many.tolist()} are given more drafts than their request's max_drafts")
    early = given[rows.expected[given] > rows.num_tokens[given]]
    if early.size:
        raise ValueError(f"rows {early.tolist()} have a token in flight, which drafts could only follow")
    rows.draft(given, ids, wanted)
