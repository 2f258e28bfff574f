"""Limits and requests are validated; step batches are cut and joined."""

import numpy as np
import pytest

from batchsched import Limits, Request, RequestRefused
from batchsched.records import StepBatch


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((0, 8, 8), "max_num_seqs is 0"),
        ((1, 0, 8), "max_num_batched_tokens is 0"),
        ((1, 8, 1), "max_model_len is 1"),
        ((1, 8, 8, -1), "long_prefill_token_threshold is -1"),
        ((1, 8, 8, 0, -0.5), r"watermark is -0\.5"),
        ((1, 8, 8, 0, 0.5, 0), "stages is 0"),
        ((1, 8, 8, 0, 0.5, 1, -1), "max_tokens_with_drafts is -1"),
    ],
)
def test_limits_that_no_plan_could_keep_are_refused(limits, message):
    with pytest.raises(ValueError, match=message):
        Limits(*limits)


def test_a_chunk_is_bounded_by_the_budget_and_the_threshold():
    assert Limits(4, 100, 1000).chunk == 100
    assert Limits(4, 100, 1000, long_prefill_token_threshold=30).chunk == 30
    assert Limits(4, 100, 1000, long_prefill_token_threshold=300).chunk == 100


def test_rows_share_what_their_own_tokens_leave_for_drafts():
    limits = Limits(8, 20, 100)
    assert [limits.drafts_per_row(rows, rows) for rows in (1, 2, 5, 8, 21)] == [19, 9, 3, 1, 0]
    assert limits.drafts_per_row(8, 2) == 6
    assert limits.drafts_per_row(0, 0) == 20
    few = Limits(8, 20, 100, max_tokens_with_drafts=7)
    assert [few.drafts_per_row(tokens, 2) for tokens in (2, 3, 4, 6, 9)] == [2, 2, 1, 0, 0]


@pytest.mark.parametrize("tokens", [[1, 2], (1, 2), np.array([1, 2]), np.array([1, 2], np.uint16)])
def test_tokens_may_be_anything_that_yields_ids(tokens):
    request = Request(1, tokens, 3, generated=tokens)
    for ids in (request.prompt, request.generated):
        assert ids.dtype == np.int32
        assert ids.tolist() == [1, 2]
    assert request.tokens.tolist() == [1, 2, 1, 2]


def test_an_int32_prompt_is_not_copied():
    prompt = np.array([1, 2], np.int32)
    request = Request(1, prompt, 1)
    assert request.prompt is prompt
    assert request.tokens is prompt


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [[1, 2]]}, r"prompt has shape \[1, 2\]"),
        ({"prompt": [1.5]}, "prompt is of float64: integer token ids are meant"),
        ({"prompt": [3, -1]}, "prompt has ids from -1 to 3: token ids lie between 0 and 2147483647"),
        ({"prompt": [2**31]}, "from 2147483648 to 2147483648"),
        ({"generated": [[1, 2]]}, r"generated has shape \[1, 2\]"),
        ({"generated": [0.5]}, "generated is of float64"),
        ({"generated": [3, -1]}, "generated has ids from -1 to 3"),
        ({"generated": [2**31]}, "generated has ids from 2147483648"),
        ({"generated": [5] * 6}, "generated has 6 tokens and max_tokens is 6: fewer leave a token"),
        ({"generated": [5] * 7}, "generated has 7 tokens and max_tokens is 6"),
        ({"max_tokens": 0}, "max_tokens is 0: at least 1"),
        ({"max_tokens": -1}, "max_tokens is -1: at least 1"),
        ({"min_tokens": 7}, "min_tokens is 7: .* here 6"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"max_drafts": -1}, "max_drafts is -1"),
        ({"stop_ids": (5, -1)}, "stop ids .* not -1 to 5"),
        ({"stop_ids": (2**31,)}, "stop ids .* not 2147483648"),
        ({"handle": 2**63}, "does not fit 64 bits"),
    ],
)
def test_invalid_requests_are_refused(change, message):
    with pytest.raises(RequestRefused, match=message):
        Request(**{"handle": 1, "prompt": [1, 2], "max_tokens": 6} | change)


def test_refusals_are_value_errors():
    assert issubclass(RequestRefused, ValueError)


def batch(*parts):
    rows, starts, counts = zip(*parts)
    return StepBatch(np.array(rows), np.array(starts, np.int32), np.array(counts, np.int32))


def parts(batch):
    return list(zip(*(column.tolist() for column in batch)))


@pytest.mark.parametrize(
    ("budget", "left"),
    [
        (10, [(3, 0, 4), (1, 9, 1), (2, 5, 5)]),
        (7, [(3, 0, 4), (1, 9, 1), (2, 5, 2)]),
        (5, [(3, 0, 4), (1, 9, 1)]),
        (4, [(3, 0, 4)]),
        (1, [(3, 0, 1)]),
    ],
)
def test_the_budget_goes_to_the_first(budget, left):
    cut = batch((3, 0, 4), (1, 9, 1), (2, 5, 5)).within(budget)
    assert parts(cut) == left
    assert cut.counts.dtype == np.int32


def test_how_many_of_the_first_rows_fit(engine):
    memory = engine(num_blocks=8).memory
    for row in range(4):
        memory.allocate(row, None)
    three = batch((0, 0, 8), (1, 0, 4), (3, 0, 5))  # 2, 1 and 2 blocks of 4 tokens
    assert [three.num_fitting(memory, blocks) for blocks in range(6)] == [0, 0, 1, 2, 2, 3]
    assert StepBatch.empty().num_fitting(memory, 0) == 0


def test_joined():
    one, other = batch((3, 0, 4)), batch((1, 9, 1), (2, 5, 5))
    assert parts(one.joined(other)) == [(3, 0, 4), (1, 9, 1), (2, 5, 5)]
    assert one.joined(StepBatch.empty()) is one
    assert parts(StepBatch.empty().joined(other)) == parts(other)
