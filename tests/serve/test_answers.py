"""Whole answers, and what reaches the engine."""

from typing import Any

import pytest
from scripted_engine import LOGPROB, Step, say

from enginecore.sampling_params import RequestOutputKind

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hi"}]


async def complete(client, **body: Any) -> dict[str, Any]:
    response = await client.post("/v1/completions", json={"prompt": "hi", **body})
    assert response.status_code == 200, response.text
    return response.json()


async def chat(client, **body: Any) -> dict[str, Any]:
    response = await client.post("/v1/chat/completions", json={"messages": MESSAGES, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def test_completion(client, engine):
    engine.cached = 1
    answer = await complete(client)
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


async def test_chat(client, engine):
    engine.script = lambda prompt, params: [Step("yes", finish_reason="stop", stop_reason="STOP")]
    answer = await chat(client, model="alias")
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "chat.completion",
        "model": "alias",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "yes", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": "STOP",
            }
        ],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 3,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_choices_number_prompts_times_n(client, engine):
    engine.script = lambda prompt, params: say(prompt.text)
    answer = await complete(client, prompt=["x", "y"], n=2)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "x"), (1, "x"), (2, "y"), (3, "y")]
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 8


async def test_echo_of_text_and_of_ids(client):
    assert (await complete(client, echo=True))["choices"][0]["text"] == "hiab"
    assert (await complete(client, prompt=[104, 105], echo=True))["choices"][0]["text"] == "hiab"


async def test_scoring_a_prompt(client, engine):
    answer = await complete(client, echo=True, max_tokens=0, logprobs=0)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hi", "length")
    assert choice["logprobs"] == {
        "tokens": ["h", "i"],
        "text_offset": [0, 1],
        "token_logprobs": [None, LOGPROB],
        "top_logprobs": [None, {"i": LOGPROB}],
    }
    assert answer["usage"]["completion_tokens"] == 0
    assert engine.requests[0].params.max_tokens == 1


async def test_completions_logprobs(client):
    choice = (await complete(client, logprobs=1, max_tokens=2))["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["a", "b"],
        "text_offset": [0, 1],
        "token_logprobs": [LOGPROB, LOGPROB],
        "top_logprobs": [{"a": LOGPROB, "Z": -0.25}, {"b": LOGPROB, "Z": -0.25}],
    }


async def test_completions_logprobs_zero_is_the_chosen_token(client):
    choice = (await complete(client, logprobs=0, max_tokens=1))["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [LOGPROB]
    assert choice["logprobs"]["top_logprobs"] == [{"a": LOGPROB}]


async def test_chat_logprobs_without_top(client):
    for top in ({}, {"top_logprobs": None}, {"top_logprobs": 0}):
        choice = (await chat(client, logprobs=True, max_tokens=1, **top))["choices"][0]
        assert choice["logprobs"] == {
            "content": [{"token": "a", "logprob": LOGPROB, "bytes": [97], "top_logprobs": []}]
        }


async def test_chat_top_logprobs_are_the_most_likely(client):
    choice = (await chat(client, logprobs=True, top_logprobs=1, max_tokens=1))["choices"][0]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == [
        {"token": "Z", "logprob": -0.25, "bytes": [90]}
    ]
    choice = (await chat(client, logprobs=True, top_logprobs=2, max_tokens=1))["choices"][0]
    tokens = [entry["token"] for entry in choice["logprobs"]["content"][0]["top_logprobs"]]
    assert tokens == ["Z", "a"]


async def test_bytes_of_half_a_character(client, engine):
    engine.script = lambda prompt, params: [Step("", [240]), Step("🌶", [159, 140, 182], "length")]
    content = (await chat(client, logprobs=True))["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[240], [159], [140], [182]]
    assert content[0]["token"] == "\N{REPLACEMENT CHARACTER}"


async def test_prompt_logprobs(client):
    rows = [None, {"105": {"logprob": LOGPROB, "rank": 1, "decoded_token": None}}]
    assert (await complete(client, prompt_logprobs=0))["choices"][0]["prompt_logprobs"] == rows
    assert len((await chat(client, prompt_logprobs=0))["prompt_logprobs"]) == 9


async def test_every_sampling_field_reaches_the_engine(client, engine):
    fields = {
        "n": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 42,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.5,
        "stop": ["x", "y"],
        "stop_token_ids": [7],
        "ignore_eos": True,
        "min_tokens": 1,
        "max_tokens": 9,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "allowed_token_ids": [1, 2],
        "bad_words": ["no"],
    }
    for ask in (complete, chat):
        await ask(client, **fields, logit_bias={"65": 3})
        params = engine.requests[-1].params
        assert {name: getattr(params, name) for name in fields} == fields
        assert params.logit_bias == {65: 3.0}
        assert params.output_kind == RequestOutputKind.FINAL_ONLY


async def test_how_many_tokens(client, engine):
    async def asked(ask, **body):
        await ask(client, **body)
        return engine.requests[-1].params.max_tokens

    assert await asked(complete) == 16
    assert await asked(complete, max_tokens=None) == 16
    assert await asked(chat) is None
    assert await asked(chat, max_tokens=9) == 9
    assert await asked(chat, max_tokens=9, max_completion_tokens=1) == 1
    answer = await complete(client, max_tokens=1)
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_the_default_is_lowered_to_what_there_is_room_for(client, engine):
    await complete(client, prompt=[[1] * 63, [1] * 60, [1] * 40])
    assert [request.params.max_tokens for request in engine.requests] == [1, 4, 16]
    await complete(client, prompt=[1] * 63, max_tokens=16)
    assert engine.requests[-1].params.max_tokens == 16


async def test_special_tokens_around_a_completions_prompt(client, engine):
    for given, expected in (({}, True), ({"add_special_tokens": False}, False)):
        await complete(client, **given)
        assert engine.frontend.added_special_tokens is expected


async def test_priority_and_cache_salt(client, engine):
    await complete(client, priority=3, cache_salt="mine")
    await chat(client)
    sent = [(request.priority, request.prompt.cache_salt) for request in engine.requests]
    assert sent == [(3, "mine"), (0, None)]


async def test_template_options(client, engine):
    await chat(client, chat_template_kwargs={"mood": "glad"}, continue_final_message=True)
    text = engine.requests[0].prompt.text
    assert text == "user: hi\nmood=glad\ncontinue_final_message=True\nadd_generation_prompt=False\n"


async def test_long_texts_are_prepared_off_the_loop(client, engine):
    await complete(client, prompt="a" * 20_000)
    assert len(engine.requests[0].prompt.token_ids) == 20_000


async def test_the_answer_carries_the_clients_request_id(client, engine):
    async def answer_id(given: str) -> str:
        headers = {"x-request-id": given}
        response = await client.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
        return response.json()["id"]

    assert await answer_id("abc-1.2") == "cmpl-abc-1.2"
    assert "bad id" not in await answer_id("bad id")
    assert len(await answer_id("x" * 129)) == len("cmpl-") + 32
