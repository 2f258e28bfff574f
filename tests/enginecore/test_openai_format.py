"""OpenAI's formats; what the routes make of them is tested with the server."""

import math

import pytest

from enginecore.errors import RequestError
from enginecore.frontend.openai import answers, conversion, validation
from enginecore.frontend.openai.bodies import ChatBody, CompletionBody, convert, decode
from enginecore.outputs import CompletionOutput, Logprob, RequestOutput
from enginecore.sampling_params import RequestOutputKind


class Letters:
    """Token n is the nth letter of the alphabet."""

    def decode(self, ids, skip_special_tokens=True) -> str:
        return "".join(map(self.token_text, ids))

    def token_text(self, token: int, /) -> str:
        return chr(ord("a") + token)

    def token_bytes(self, token: int, /) -> bytes:
        return self.token_text(token).encode()


def test_an_error_names_the_field_and_the_place():
    for raw, message, param in (
        (b'{"temperature": "x"}', "temperature: Expected `float | null`, got `str`", "temperature"),
        (b'{"stop": ["a", 1]}', "stop[1]: Expected `str`, got `int`", "stop"),
        (b"{", "the body is not valid JSON: Input data was truncated", None),
        (b"[1]", "Expected `object`, got `array`", None),
        (b'{"prompt":' + b"[" * 10_000, "the body is nested too deeply", None),
    ):
        with pytest.raises(RequestError) as error:
            convert(decode(raw), CompletionBody)
        assert (str(error.value), error.value.param) == (message, param)


def test_the_model_is_looked_at_first():
    assert validation.model_name(decode(b"{}"), ["x", "y"]) == "x"
    assert validation.model_name(decode(b'{"model": "y", "temperature": "x"}'), ["x", "y"]) == "y"
    with pytest.raises(validation.ModelNotFound, match="there is no model 'z' here, only x, y"):
        validation.model_name(decode(b'{"model": "z", "temperature": "x"}'), ["x", "y"])


def test_a_body_without_limit_on_logprobs():
    assert validation.read_completion(decode(b'{"logprobs": 1000}'), -1).logprobs == 1000
    with pytest.raises(RequestError, match="logprobs must be at least 0, got -1"):
        validation.read_completion(decode(b'{"logprobs": -1}'), -1)


def test_output_kinds():
    whole, stream = CompletionBody(), CompletionBody(stream=True)
    assert conversion.completion_params(whole, {}).output_kind == RequestOutputKind.FINAL_ONLY
    assert conversion.completion_params(stream, {}).output_kind == RequestOutputKind.DELTA


@pytest.mark.parametrize(
    "asked, min_tokens, prompt, expected",
    [(None, None, 10, 16), (None, None, 60, 4), (None, None, 64, 16), (None, 5, 60, 16), (9, None, 60, 9)],
)
def test_the_default_of_max_tokens_fits_the_prompt(asked, min_tokens, prompt, expected):
    body = CompletionBody(max_tokens=asked, min_tokens=min_tokens)
    params = conversion.completion_params(body, {})
    assert conversion.fit_default(body, params, prompt, 64).max_tokens == expected


def test_completion_logprobs():
    rows = [None, {1: Logprob(-0.5, 2, "b"), 2: Logprob(-math.inf, 3, None)}]
    assert answers.completion_logprobs([0, 1], rows, Letters(), start=3) == {
        "tokens": ["a", "b"],
        "text_offset": [3, 4],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"b": -0.5, "c": -9999.0}],
    }


def test_chat_logprobs_keep_the_most_likely():
    row = {5: Logprob(-9.0, 40, None), 1: Logprob(-0.5, 1, None), 2: Logprob(-1.0, 2, None)}
    (entry,) = answers.chat_logprobs([5], [row], 2, Letters())["content"]
    assert (entry["token"], entry["bytes"], entry["logprob"]) == ("f", [102], -9.0)
    assert [candidate["token"] for candidate in entry["top_logprobs"]] == ["b", "c"]


def test_usage_counts_each_prompt_once():
    samples = [CompletionOutput(index, token_ids=[1, 2, 3]) for index in range(2)]
    output = RequestOutput("r", None, [1, 2], samples, True, num_cached_tokens=1)
    assert answers.count_usage([output, output]) == {
        "prompt_tokens": 4,
        "completion_tokens": 12,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_text_is_refused_where_there_is_no_tokenizer():
    output = RequestOutput("r", None, [1], [], True)
    with pytest.raises(RequestError, match="no tokenizer"):
        answers.echoed_text(output, answers.NoVocabulary())


def test_the_models_own_parameters_fill_what_a_body_leaves_open():
    body = convert(decode(b'{"prompt": "a", "top_p": 0.5, "temperature": null}'), CompletionBody)
    params = conversion.completion_params(body, {"temperature": 0.2, "top_p": 0.9, "top_k": 20})
    assert (params.temperature, params.top_p, params.top_k) == (0.2, 0.5, 20)


def test_an_error_names_the_field_that_was_sent():
    body = convert(decode(b'{"messages": [], "max_completion_tokens": 0, "max_tokens": 5}'), ChatBody)
    with pytest.raises(RequestError, match="max_completion_tokens must be at least 1") as error:
        conversion.chat_params(body, {})
    assert error.value.param == "max_completion_tokens"
