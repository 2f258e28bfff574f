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

    special_ids = frozenset()

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
        (b'{"n": 1, "max_tokens": 1e400}', "max_tokens: Number out of range", "max_tokens"),
        (b'{"max_tokens": 1' + b"0" * 5000 + b"}", "max_tokens: Integer value out of range", "max_tokens"),
        (b'{"stop": [{"a": 1e400}]}', "stop: Number out of range", "stop"),
        (
            b'{"max_tokens": 1' + b"0" * 30 + b"}",
            "max_tokens: Expected `int` <= 9223372036854775807",
            "max_tokens",
        ),
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
    assert validation.read_completion(decode(b'{"logprobs": -1, "prompt_logprobs": -1}'), -1).logprobs == -1
    with pytest.raises(RequestError, match="logprobs must be at least -1, the whole vocabulary, got -2"):
        validation.read_completion(decode(b'{"logprobs": -2}'), -1)


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


class Bytes:
    """Token n is the byte n; 256 is special."""

    special_ids = frozenset({256})

    def decode(self, ids, skip_special_tokens=True) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def token_text(self, token: int, /) -> str:
        return self.token_bytes(token).decode(errors="replace")

    def token_bytes(self, token: int, /) -> bytes:
        return bytes([token]) if token < 256 else b"<eos>"


def test_completion_logprobs():
    rows = [None, {1: Logprob(-0.5, 2, "b"), 2: Logprob(-math.inf, 3, None)}]
    assert answers.completion_logprobs([0, 1], rows, Letters(), answers.TextOffsets(Letters())) == {
        "tokens": ["a", "b"],
        "text_offset": [0, 1],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"b": -0.5, "c": -9999.0}],
    }


@pytest.mark.parametrize("chosen", [0xE9, 0xFF, 0xF0])
def test_the_chosen_token_stands_among_candidates_that_share_its_text(chosen):
    """HC-94: bytes that are no character all read U+FFFD."""
    likeliest = {0xFF: -0.1, 0x61: -1.0, 0xE9: -2.0, 0xF0: -3.0}
    row = {chosen: Logprob(likeliest[chosen], 1, None)}
    row |= {token: Logprob(value, 1, None) for token, value in likeliest.items()}
    shape = answers.completion_logprobs([chosen], [row], Bytes(), answers.TextOffsets(Bytes()))
    assert shape["top_logprobs"] == [{"\ufffd": likeliest[chosen], "a": -1.0}]
    assert shape["token_logprobs"] == [likeliest[chosen]]


def test_where_the_chosen_token_has_a_text_of_its_own_the_likeliest_of_the_others_stands():
    row = {token: Logprob(-float(place), place, None) for place, token in enumerate((0x61, 0xFF, 0xE9))}
    shape = answers.completion_logprobs([0x61], [row], Bytes(), answers.TextOffsets(Bytes()))
    assert shape["top_logprobs"] == [{"a": 0.0, "\ufffd": -1.0}]


@pytest.mark.parametrize("pieces", [[9], [1] * 9, [3, 3, 3], [2, 7]], ids=str)
def test_offsets_are_characters_of_the_text_however_it_is_cut(pieces):
    text = "a\N{HOT PEPPER}é"
    ids = [*text.encode(), 256, ord("b")]
    assert len(ids) == 9
    offsets = answers.TextOffsets(Bytes())
    found = []
    for size in pieces:
        part, ids = ids[:size], ids[size:]
        rows = [{token: Logprob(0.0)} for token in part]
        found += answers.completion_logprobs(part, rows, Bytes(), offsets)["text_offset"]
    assert found == [0, 1, 1, 1, 1, 2, 2, 3, 3]


def test_tokens_that_a_stop_string_cut_off_stand_at_the_end():
    rows = [{token: Logprob(0.0)} for token in b"abSTOP"]
    shape = answers.completion_logprobs(list(b"abSTOP"), rows, Bytes(), answers.TextOffsets(Bytes()), 2)
    assert shape["text_offset"] == [0, 1, 2, 2, 2, 2]


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


def test_the_models_own_length_is_the_default():
    """generation_config.json's max_new_tokens; a prompt that leaves less room lowers it."""
    defaults = {"max_tokens": 40}
    for kind, params_of in (
        (CompletionBody, conversion.completion_params),
        (ChatBody, conversion.chat_params),
    ):
        asking = {"messages": []} if kind is ChatBody else {}
        open_body, own_body = kind(**asking), kind(**asking, max_tokens=7)
        params = params_of(open_body, defaults)
        assert params.max_tokens == 40
        assert conversion.fit_default(open_body, params, 60, 64).max_tokens == 4
        assert params_of(own_body, defaults).max_tokens == 7
    newer = ChatBody(messages=[], max_completion_tokens=5)
    assert conversion.fit_default(newer, conversion.chat_params(newer, defaults), 60, 64).max_tokens == 5
    assert conversion.chat_params(ChatBody(messages=[]), {}).max_tokens is None


@pytest.mark.parametrize(
    ("message", "param", "named"),
    [
        ("extra_args: steering:Steer: no", "extra_args", ("vllm_xargs: steering:Steer: no", "vllm_xargs")),
        ("beam_width=11 needs 22", "beam_width", ("n=11 needs 22", "n")),
        ("seed must be", "seed", ("seed must be", "seed")),
    ],
)
def test_an_error_of_the_engine_names_the_field_of_the_body(message, param, named):
    with pytest.raises(RequestError) as error, conversion.blaming(CompletionBody()):
        raise RequestError(message, param)
    assert (str(error.value), error.value.param) == named


def test_arguments_of_processors_reach_the_parameters():
    body = convert(decode(b'{"vllm_xargs": {"a": [1, "b"]}}'), CompletionBody)
    assert conversion.completion_params(body, {}).extra_args == {"a": [1, "b"]}
    body = convert(decode(b'{"vllm_xargs": {"a": "\\u00e9"}, "messages": []}'), ChatBody)
    assert conversion.chat_params(body, {}).extra_args == {"a": "é"}
