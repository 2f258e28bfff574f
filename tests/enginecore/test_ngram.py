"""Prompt lookup against a search through all of a request's tokens."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginecore.core.ngram import NgramProposer
from enginecore.speculation import Speculation


def search(tokens, least, most, count):
    """The drafts for `tokens`: what followed the longest suffix that stood before, where it stood last."""
    for size in range(min(most, len(tokens) - 1), least - 1, -1):
        for after in range(len(tokens) - 1, size - 1, -1):
            if tokens[after - size : after] == tokens[-size:]:
                drafts = list(tokens[after:])
                while len(drafts) < count:
                    drafts.append(drafts[len(drafts) - (len(tokens) - after)])
                return drafts[:count]
    return None


class Rows:
    """Rows of tokens as the scheduler keeps them, and a proposer that is told of their changes."""

    def __init__(self, least, most, count, num_rows=4, max_len=64):
        self.rule = least, most, count
        self.proposer = NgramProposer(Speculation(count, least, most), num_rows, max_len)
        self.tokens = np.full((num_rows, max_len), -1, np.int32)
        self.num_tokens = np.zeros(num_rows, np.int32)

    def begin(self, row, tokens):
        self.proposer.begin(row)
        self.num_tokens[row] = 0
        self.append(row, tokens)

    def append(self, row, tokens):
        end = self.num_tokens[row] + len(tokens)
        self.tokens[row, self.num_tokens[row] : end] = tokens
        self.num_tokens[row] = end

    def propose(self, rows):
        drafts = self.proposer.propose(np.array(rows), self.tokens, self.num_tokens)
        return dict(zip(drafts.rows.tolist(), drafts.tokens.tolist(), strict=True))

    def expected(self, rows):
        found = {row: search(self.tokens[row, : self.num_tokens[row]].tolist(), *self.rule) for row in rows}
        return {row: drafts for row, drafts in found.items() if drafts is not None}


def test_the_tokens_after_the_last_ones_where_they_stood_before():
    rows = Rows(2, 3, 4)
    rows.begin(0, [1, 2, 3, 4, 5, 6, 7, 2, 3])
    rows.begin(2, [1, 2, 3, 4, 5, 6])
    assert rows.propose([0, 2]) == {0: [4, 5, 6, 7]}


def test_the_longest_n_gram_counts_and_of_equal_ones_the_last():
    rows = Rows(1, 2, 2)
    rows.begin(0, [5, 6, 40, 41, 5, 6, 50, 51, 9, 6, 60, 61, 5, 6])
    assert rows.propose([0]) == {0: [50, 51]}


def test_drafts_that_reach_the_end_repeat():
    rows = Rows(2, 2, 7)
    rows.begin(0, [9, 1, 2, 3, 1, 2])
    assert rows.propose([0]) == {0: [3, 1, 2, 3, 1, 2, 3]}


def test_a_row_that_begins_again_has_forgotten_its_tokens():
    rows = Rows(2, 2, 2)
    rows.begin(0, [1, 2, 3, 1, 2])
    assert rows.propose([0]) == {0: [3, 1]}
    rows.begin(0, [7, 1, 2])
    assert rows.propose([0]) == {}


token = st.integers(0, 2)
lists = st.lists(token, min_size=1, max_size=12)


@settings(deadline=None, max_examples=200)
@given(
    st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(1, 5)),
    st.lists(st.tuples(st.sampled_from(["begin", "append", "append"]), st.sets(st.integers(0, 3)), lists)),
)
def test_any_rows_get_what_a_search_finds(rule, steps):
    """Among so few n-grams no two have the same slot of a table."""
    least, more, count = rule
    rows = Rows(least, least + more, count, max_len=8192)
    for row in range(4):
        rows.begin(row, [row])
    for action, some, tokens in steps:
        for row in sorted(some):
            if action == "begin":
                rows.begin(row, tokens)
            else:
                rows.append(row, tokens)
        chosen = sorted(some)
        if chosen:
            assert rows.propose(chosen) == rows.expected(chosen)


@pytest.mark.parametrize("vocab", [3, 2**31 - 1])
def test_a_long_row_keeps_to_what_stood_there(vocab):
    """Its table has fewer slots than it has n-grams: older ones are lost, and none is taken for another."""
    rows = Rows(3, 3, 4, num_rows=1, max_len=60_000)
    rng = random.Random(0)
    rows.begin(0, [rng.randrange(vocab) for _ in range(50_000)])
    hits = 0
    for _ in range(200):
        before = rows.tokens[0, : rows.num_tokens[0]].tolist()
        back = rng.randrange(100, 3000)
        rows.append(0, before[-back : -back + 3])
        drafts = rows.propose([0])
        hits += bool(drafts)
        if drafts:
            assert drafts == rows.expected([0])
    assert hits > 100
