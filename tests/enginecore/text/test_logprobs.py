import numpy as np

from enginecore.frontend.text.logprobs import logprob_rows
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.messages import PositionLogprobs
from enginecore.outputs import Logprob


def entry(ids: list[list[int]], values: list[list[float]], ranks: list[int]) -> PositionLogprobs:
    return PositionLogprobs(np.array(ids, np.int32), np.array(values, np.float32), np.array(ranks, np.int32))


def test_the_chosen_token_and_the_most_likely_by_rank(byte_tokenizer: Tokenizer) -> None:
    rows = logprob_rows(
        entry([[97, 98, 99], [98, 98, 257]], [[-5, -1, -2], [-0.5, -0.5, -3]], [7, 1]), byte_tokenizer
    )
    assert rows == [
        {97: Logprob(-5.0, 7, "a"), 98: Logprob(-1.0, 1, "b"), 99: Logprob(-2.0, 2, "c")},
        {98: Logprob(-0.5, 1, "b"), 257: Logprob(-3.0, 2, "<eos>")},
    ]
    assert list(rows[0]) == [97, 98, 99]


def test_the_chosen_token_alone(byte_tokenizer: Tokenizer) -> None:
    assert logprob_rows(entry([[0xC3]], [[-0.25]], [3]), byte_tokenizer) == [
        {0xC3: Logprob(-0.25, 3, "\ufffd")}
    ]


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert logprob_rows(entry([[5]], [[-0.25]], [1]), None) == [{5: Logprob(-0.25, 1, None)}]
