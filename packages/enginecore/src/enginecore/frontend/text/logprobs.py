"""Log probabilities as callers get them: candidates with their text."""

from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.messages import PositionLogprobs
from enginecore.outputs import Logprob

LogprobRow = dict[int, Logprob]
"""Candidates at one position by token id: the actual token first, then the most likely ones."""


def logprob_rows(
    entry: PositionLogprobs, tokenizer: Tokenizer | None, *, by_rank: bool = True
) -> list[LogprobRow]:
    """Return one dict a position: the actual token first, then the others, which are the likeliest `by_rank`.

    An actual token that is among the others stands once. `decoded_token` is the token's text as it stands in
    a text, or None without a tokenizer.
    """
    rows = []
    for tokens, logprobs, rank in zip(entry.ids.tolist(), entry.values.tolist(), entry.ranks.tolist()):
        row: LogprobRow = {}
        for place, (token, logprob) in enumerate(zip(tokens, logprobs)):
            if token not in row:
                text = None if tokenizer is None else tokenizer.token_text(token)
                row[token] = Logprob(logprob, (place if by_rank else None) if place else rank, text)
        rows.append(row)
    return rows
