"""What becomes of the tokens a step sampled."""

import numpy as np
from numpy.typing import NDArray

from batchsched.flights import Landed
from batchsched.messages import Committed
from batchsched.rows import Rows


def emit(landed: Landed, rows: Rows) -> Committed:
    """Add what was sampled to the rows whose request lives, up to its end."""
    if landed.counts is None:
        return _emit_one_each(landed, rows)
    return _emit_runs(landed, landed.counts, rows)


def _emit_one_each(landed: Landed, rows: Rows) -> Committed:
    index = np.flatnonzero(rows.accepting[landed.flight.sampling])
    emitting = landed.flight.sampling[index]
    tokens = landed.tokens[index]
    finished = rows.append(emitting, tokens)
    return _committed(rows, emitting, tokens, finished, index, rows.num_tokens[emitting])


def _emit_runs(landed: Landed, counts: NDArray[np.int32], rows: Rows) -> Committed:
    flight = landed.flight
    assert flight.num_drafts is not None
    lives = rows.accepting[flight.sampling]
    index = np.flatnonzero(np.repeat(lives, counts))
    tokens = landed.tokens[index]
    ends, finished = rows.append_runs(flight.sampling[lives], tokens, counts[lives])
    rows.settle(flight.sampling[lives & (flight.num_drafts > 0)])
    emitted = np.flatnonzero(ends)
    index = index[emitted]
    emitting = np.repeat(flight.sampling, counts)[index]
    return _committed(rows, emitting, tokens[emitted], finished[emitted], index, ends[emitted])


def _committed(
    rows: Rows,
    emitting: NDArray[np.intp],
    tokens: NDArray[np.int32],
    finished: NDArray[np.int8],
    index: NDArray[np.intp],
    ends: NDArray[np.int32],
) -> Committed:
    return Committed(
        handles=rows.handle[emitting],
        tokens=tokens,
        finished=finished,
        index=index.astype(np.int32),
        num_generated=ends - rows.num_prompt[emitting],
        num_cached=rows.num_cached[emitting],
        rows=emitting.astype(np.int32),
    )
