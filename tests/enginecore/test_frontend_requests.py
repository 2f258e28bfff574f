"""A request is checked, and becomes messages to the core."""

from pathlib import Path
from typing import Any

import pytest

from data_files import STORIES
from enginecore.errors import RequestError
from enginecore.frontend.frontend import Frontend
from enginecore.frontend.request import Prompt
from enginecore.frontend.text.loading import load_tokenizer
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.messages import EngineLimits
from enginecore.model_files import ModelFiles
from enginecore.sampling_params import SamplingParams
from front_ends import EOS, add, front, greedy, ids, run

# Prompts


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", Prompt("ab", [97, 98])),
        ([97, 319], Prompt(None, [97, 319])),
        ((1, 2), Prompt(None, [1, 2])),
        ({"prompt": "ab"}, Prompt("ab", [97, 98])),
        ({"prompt_token_ids": [5], "cache_salt": "x"}, Prompt(None, [5], "x")),
        ({"prompt": "shown", "prompt_token_ids": [5]}, Prompt("shown", [5])),
        (Prompt("z", [3]), Prompt("z", [3])),
    ],
)
def test_forms_of_a_prompt(frontend: Frontend, prompt: Any, expected: Prompt) -> None:
    assert frontend.prepare_prompt(prompt) == expected


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        [1, "a"],
        [[1]],
        [1.0],
        [True],
        b"ab",
        {},
        {"prompt": None},
        {"prompt": [1]},
        {"prompt_token_ids": "ab"},
        {"prompt": "a", "multi_modal_data": {}},
        {"prompt": "a", "cache_salt": 3},
        "\ud800",
    ],
)
def test_other_prompts_are_refused(frontend: Frontend, prompt: Any) -> None:
    with pytest.raises(RequestError):
        frontend.prepare_prompt(prompt)


@pytest.mark.parametrize("prompt", ["", [], {"prompt": ""}, {"prompt_token_ids": []}])
def test_prompts_without_a_token_are_refused(frontend: Frontend, prompt: Any) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        add(frontend, "r", frontend.prepare_prompt(prompt), greedy())
    run(frontend, [EOS], greedy())


def test_an_empty_text_is_a_prompt_where_bos_is_added(tokenizer_folders: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(ModelFiles("", tokenizer_folders["byte-fallback"], {}))
    frontend = front(tokenizer)
    assert frontend.prepare_prompt("").token_ids == [1]
    assert frontend.prepare_prompt("", add_special_tokens=False).token_ids == []


@pytest.mark.parametrize("given", [{"cache_salt": "\ud800"}, {}])
def test_a_salt_of_half_a_surrogate_pair_is_refused(frontend: Frontend, given: dict[str, str]) -> None:
    prompt = frontend.prepare_prompt({"prompt": "a", **given}, cache_salt="x\udfff")
    with pytest.raises(RequestError, match="half a surrogate pair") as refusal:
        add(frontend, "r", prompt, greedy())
    assert refusal.value.param == "cache_salt"
    assert frontend.unfinished == 0


@pytest.mark.parametrize("token", [-1, 320, 2**63])
def test_ids_outside_the_vocabulary_are_refused(frontend: Frontend, token: int) -> None:
    with pytest.raises(RequestError, match=f"token id {token}, but the vocabulary ends at 319"):
        add(frontend, "r", Prompt(None, [5, token, 6]), greedy())
    add(frontend, "r", Prompt(None, [319, 0]), greedy())


@pytest.mark.parametrize(
    ("length", "max_tokens", "expected"),
    [
        (62, None, 2),
        (62, 1, 1),
        (62, 2, 2),
        (63, None, 1),
        (63, 1, 1),
    ],
)
def test_prompts_that_just_fit(
    frontend: Frontend, length: int, max_tokens: int | None, expected: int
) -> None:
    [request] = add(frontend, "r", Prompt(None, [1] * length), greedy(max_tokens=max_tokens))
    assert request.max_tokens == expected


@pytest.mark.parametrize(
    ("length", "max_tokens", "param"),
    [
        (62, 100, "max_tokens"),
        (63, 2, "max_tokens"),
        (64, None, "prompt"),
        (64, 1, "prompt"),
        (65, 1, "prompt"),
    ],
)
def test_prompts_that_do_not_fit(frontend: Frontend, length: int, max_tokens: int | None, param: str) -> None:
    with pytest.raises(RequestError, match=f"context length is 64 tokens. However, .*{length}.*") as refusal:
        add(frontend, "r", Prompt(None, [1] * length), greedy(max_tokens=max_tokens))
    assert refusal.value.param == param
    assert refusal.value.code == "context_length_exceeded"
    assert isinstance(refusal.value, ValueError)
    assert frontend.unfinished == 0


# Parameters


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"logprobs": 21}, "at most max_logprobs=20", "logprobs"),
        ({"prompt_logprobs": 10**6}, "at most max_logprobs=20", "prompt_logprobs"),
        ({"logprobs": -1}, "at most max_logprobs=20", "logprobs"),
        ({"stop_token_ids": [320]}, "vocabulary ends at 319", "stop_token_ids"),
        ({"allowed_token_ids": [320]}, "vocabulary ends at 319", "allowed_token_ids"),
        ({"logit_bias": {320: 1.0}}, "vocabulary ends at 319", "logit_bias"),
        (
            {"max_tokens": None, "min_tokens": 64},
            "leaves room for 63 tokens, fewer than min_tokens=64",
            "min_tokens",
        ),
    ],
)
def test_parameters_the_model_cannot_meet(
    frontend: Frontend, fields: dict[str, Any], message: str, param: str
) -> None:
    with pytest.raises(RequestError, match=message) as refusal:
        add(frontend, "r", Prompt(None, [1]), SamplingParams(**fields))
    assert refusal.value.param == param
    assert frontend.unfinished == 0


def test_no_limit_on_logprobs(byte_tokenizer: Tokenizer) -> None:
    frontend = front(byte_tokenizer, max_logprobs=-1)
    assert len(add(frontend, "r", Prompt(None, [1]), SamplingParams(logprobs=-1))) == 1


# What goes to the core


def test_messages_to_the_core(frontend: Frontend) -> None:
    params = greedy(max_tokens=5, seed=9)
    prompt = frontend.prepare_prompt({"prompt": "hi", "cache_salt": "s"})
    with pytest.raises(RequestError, match="priority has no effect"):
        add(frontend, "r", prompt, params, priority=3)
    [request] = add(frontend, "r", prompt, params)
    assert request.prompt.tolist() == ids("hi")
    assert (request.max_tokens, request.sampling.seed) == (5, 9)
    assert (request.priority, request.cache_salt) == (0, "s")
    [other] = add(frontend, "q", frontend.prepare_prompt("hi", cache_salt="t"), params)
    assert (other.cache_salt, other.number) == ("t", request.number + 1)


def test_seeds(byte_tokenizer: Tokenizer) -> None:
    def seeds(frontend: Frontend, request_id: str, **fields: Any) -> list[int]:
        return [
            request.sampling.seed
            for request in add(frontend, request_id, Prompt(None, [1]), SamplingParams(**fields))
        ]

    one, two = front(byte_tokenizer, seed=7), front(byte_tokenizer, seed=7)
    assert seeds(one, "a", seed=5, n=3) == seeds(two, "a", seed=5, n=3)
    assert len(set(seeds(one, "b", seed=5, n=3))) == 3
    unseeded = [*seeds(one, "c", n=2), *seeds(one, "d")]
    assert len(set(unseeded)) == 3
    assert unseeded == [*seeds(two, "c", n=2), *seeds(two, "d")]
    assert all(-(2**63) <= seed < 2**63 for seed in seeds(one, "e", seed=2**63 - 1, n=3))


def test_bad_words_stand_alone_and_after_a_space(frontend: Frontend) -> None:
    [request] = add(frontend, "r", Prompt(None, [1]), greedy(bad_words=["ab", " c"]))
    assert request.sampling.bad_words == [ids("ab"), ids("c")]
    tokenizer = load_tokenizer(ModelFiles("", STORIES, {}))
    assert tokenizer is not None
    words = front(tokenizer)
    words.limits = EngineLimits(64, tokenizer.vocab_size, 8, 16)
    [request] = add(words, "r", Prompt(None, [1]), greedy(bad_words=["red"]))
    assert [tokenizer.decode(word) for word in request.sampling.bad_words] == ["red", " red"]
