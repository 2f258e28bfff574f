"""Log probabilities as the core sends them, turned into what a caller reads."""

from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.messages import TokenLogprobs
from enginecore.outputs import Logprob


def logprob_rows(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> list[dict[int, Logprob]]:
    """Return one dict a position: the chosen token first, then the most likely ones by rank.

    A chosen token that is among the most likely stands once. `decoded_token` is the token's text as it stands
    in a text, or None without a tokenizer.
    """
    ids, values, ranks = entry.rows()
    rows = []
    for tokens, logprobs, rank in zip(ids.tolist(), values.tolist(), ranks.tolist()):
        row: dict[int, Logprob] = {}
        for place, (token, logprob) in enumerate(zip(tokens, logprobs)):
            if token not in row:
                text = None if tokenizer is None else tokenizer.token_text(token)
                row[token] = Logprob(logprob, place or rank, text)
        rows.append(row)
    return rows
