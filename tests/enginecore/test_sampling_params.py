"""What SamplingParams refuses, and what it makes of the rest."""

import pytest

from enginecore.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 0}, "n must be"),
        ({"n": 10**6}, "n must be"),
        ({"n": 2, "temperature": 0}, "n must be 1 with temperature 0"),
        ({"temperature": -1}, "temperature must be finite and at least 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": True}, "temperature must be a number"),
        ({"top_p": 0}, "top_p must be finite and in"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty must be finite and greater than 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer"),
        ({"max_tokens": 6, "min_tokens": 7}, "min_tokens must be at most max_tokens=6"),
        ({"stop": 5}, "stop must be a list"),
        ({"stop": [""]}, "non-empty"),
        ({"stop": ["a"], "detokenize": False}, "need detokenize"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"logit_bias": {"abc": 1}}, "logit_bias keys must be token ids"),
        ({"logit_bias": {"6_5": 1}}, "logit_bias keys must be token ids"),
        ({"logit_bias": {" 65": 1}}, "logit_bias keys must be token ids"),
        ({"logit_bias": {"\u0666\u0665": 1}}, "logit_bias keys must be token ids"),
        ({"logit_bias": {"-1": 1}}, "logit_bias key must be at least 0"),
        ({"logit_bias": {"1": float("nan")}}, "must be a number"),
        ({"structured_outputs": {}}, "structured_outputs is not supported"),
    ],
    ids=str,
)
def test_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**settings)


def test_normalised():
    params = SamplingParams(stop="x", top_k=-1, temperature=1e-9, logit_bias={"65": 1e9, 66: -1e9})
    assert (params.stop, params.top_k, params.temperature) == (["x"], 0, 0.01)
    assert params.logit_bias == {65: 100.0, 66: -100.0}
