import numpy as np
import pytest

from batchsched import Request, RequestRefused


@pytest.mark.parametrize("tokens", [[1, 2], (1, 2), np.array([1, 2]), np.array([1, 2], np.uint16)])
def test_tokens_may_be_anything_that_yields_ids(tokens):
    request = Request(1, tokens, 1)
    assert request.tokens.dtype == np.int32
    assert request.tokens.tolist() == [1, 2]


def test_an_int32_array_is_not_copied():
    tokens = np.array([1, 2], np.int32)
    assert Request(1, tokens, 1).tokens is tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": []}, "prompt is empty"),
        ({"tokens": [[1, 2]]}, r"shape \[1, 2\]"),
        ({"tokens": [1.5]}, "float64: integer ids are meant"),
        ({"tokens": [3, -1]}, "between 0 and 2147483647, not -1 to 3"),
        ({"tokens": [2**31]}, "not 2147483648 to 2147483648"),
        ({"max_tokens": 0}, "max_tokens is 0: at least 1"),
        ({"max_tokens": -1}, "max_tokens is -1: at least 1"),
        ({"min_tokens": 7}, "min_tokens is 7: .* here 6"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"stop_ids": (5, -1)}, "stop ids .* not -1 to 5"),
        ({"handle": 2**63}, "does not fit 64 bits"),
    ],
)
def test_what_makes_no_sense_is_refused(change, message):
    with pytest.raises(RequestRefused, match=message):
        Request(**{"handle": 1, "tokens": [1, 2], "max_tokens": 6} | change)


def test_refusals_are_value_errors():
    assert issubclass(RequestRefused, ValueError)
