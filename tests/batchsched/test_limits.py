import pytest

from batchsched import Limits


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((0, 8, 8), "max_num_seqs is 0"),
        ((1, 0, 8), "max_num_batched_tokens is 0"),
        ((1, 8, 1), "max_model_len is 1"),
        ((1, 8, 8, -1), "long_prefill_token_threshold is -1"),
        ((1, 8, 8, 0, -0.5), r"headroom is -0\.5"),
        ((1, 8, 8, 0, 0.5, 0), "stages is 0"),
    ],
)
def test_limits_that_no_plan_could_keep(limits, message):
    with pytest.raises(ValueError, match=message):
        Limits(*limits)


def test_a_chunk_is_bounded_by_the_budget_and_the_threshold():
    assert Limits(4, 100, 1000).chunk == 100
    assert Limits(4, 100, 1000, long_prefill_token_threshold=30).chunk == 30
    assert Limits(4, 100, 1000, long_prefill_token_threshold=300).chunk == 100
