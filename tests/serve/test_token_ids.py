"""Token ids in answers: `return_token_ids`, `return_tokens_as_token_ids`, `logprob_token_ids`."""

import json
from typing import Any

import pytest
from scripted_engine import LOGPROB, Step, say

pytestmark = pytest.mark.anyio

TEXT = {"prompt": "hi"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
CHAT_IDS = list(b"user: hi\n")
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


async def answer(client, route: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(route, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def chunks(client, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await client.post(route, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


async def refusal(client, route: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(route, json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


async def test_ids_of_completions(client):
    body = {**TEXT, "prompt": [[104, 105], [5, 6]], "n": 2, "return_token_ids": True}
    choices = (await answer(client, COMPLETIONS, body))["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[104, 105]] * 2 + [[5, 6]] * 2
    assert [choice["token_ids"] for choice in choices] == [[97, 98, 257]] * 4
    for without in ({}, {"return_token_ids": False}, {"return_token_ids": None}):
        (choice,) = (await answer(client, COMPLETIONS, {**TEXT, **without}))["choices"]
        assert not {"token_ids", "prompt_token_ids"} & set(choice)


async def test_ids_of_a_chat(client):
    found = await answer(client, CHATS, {**CHAT, "return_token_ids": True})
    assert found["prompt_token_ids"] == CHAT_IDS
    assert [choice["token_ids"] for choice in found["choices"]] == [[97, 98, 257]]
    assert "prompt_token_ids" not in await answer(client, CHATS, CHAT)


@pytest.mark.parametrize("echo", [False, True])
async def test_ids_in_a_stream_of_completions(client, engine, echo):
    # The second token is half a character, which has no text yet, and has to be told all the same.
    engine.script = lambda prompt, params: [
        Step("a"),
        Step("", [0xC3]),
        Step("é", [0xA9]),
        Step("", [257], "stop"),
    ]
    found = await chunks(client, COMPLETIONS, {**TEXT, "n": 2, "echo": echo, "return_token_ids": True})
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in found if chunk["choices"][0]["index"] == index]
        assert [choice.get("prompt_token_ids") for choice in mine] == [[104, 105], None, None, None, None]
        assert [choice.get("token_ids") for choice in mine] == [None, [97], [0xC3], [0xA9], [257]]
        assert "".join(choice["text"] for choice in mine) == ("hi" if echo else "") + "aé"


async def test_ids_in_a_stream_of_a_chat(client, engine):
    engine.script = lambda prompt, params: [
        Step("a"),
        Step("", [0xC3]),
        Step("é", [0xA9]),
        Step("", [257], "stop"),
    ]
    found = await chunks(client, CHATS, {**CHAT, "return_token_ids": True})
    assert [chunk.get("prompt_token_ids") for chunk in found] == [CHAT_IDS, None, None, None, None]
    ids = [chunk["choices"][0].get("token_ids") for chunk in found]
    assert ids == [None, [97], [0xC3], [0xA9], [257]]
    plain = await chunks(client, CHATS, CHAT)
    assert len(plain) == 4
    assert not any("token_ids" in choice for chunk in plain for choice in [chunk, *chunk["choices"]])


async def test_the_prompt_alone_has_no_ids_of_its_own(client):
    body = {**TEXT, "echo": True, "max_tokens": 0, "logprobs": 0, "return_token_ids": True}
    (choice,) = (await answer(client, COMPLETIONS, body))["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([104, 105], [])


@pytest.mark.parametrize("streamed", [False, True])
async def test_tokens_named_by_their_ids(client, streamed):
    body = {**TEXT, "logprobs": 1, "max_tokens": 2, "return_tokens_as_token_ids": True}
    if streamed:
        shapes = [chunk["choices"][0]["logprobs"] for chunk in await chunks(client, COMPLETIONS, body)]
        tokens = [token for shape in shapes for token in shape["tokens"]]
        tops = [top for shape in shapes for top in shape["top_logprobs"]]
    else:
        shape = (await answer(client, COMPLETIONS, body))["choices"][0]["logprobs"]
        tokens, tops = shape["tokens"], shape["top_logprobs"]
        assert shape["text_offset"] == [0, 1]
    assert tokens == ["token_id:97", "token_id:98"]
    assert tops == [{token: LOGPROB, "token_id:90": -0.25} for token in tokens]
    chat = {**CHAT, "logprobs": True, "top_logprobs": 1, "max_tokens": 1, "return_tokens_as_token_ids": True}
    if streamed:
        entry = (await chunks(client, CHATS, chat))[1]["choices"][0]["logprobs"]["content"][0]
    else:
        entry = (await answer(client, CHATS, chat))["choices"][0]["logprobs"]["content"][0]
    assert (entry["token"], entry["bytes"]) == ("token_id:97", [97])
    assert [other["token"] for other in entry["top_logprobs"]] == ["token_id:90"]


async def test_log_probabilities_of_named_tokens(client, engine):
    wanted = {"logprob_token_ids": [65, 66], "max_tokens": 1}
    shape = (await answer(client, COMPLETIONS, {**TEXT, **wanted}))["choices"][0]["logprobs"]
    assert shape["top_logprobs"] == [{"a": LOGPROB, "A": -65, "B": -66}]
    (request,) = engine.requests
    assert (request.params.logprob_token_ids, request.params.logprobs) == ([65, 66], None)
    shape = (await answer(client, COMPLETIONS, {**TEXT, **wanted, "echo": True}))["choices"][0]["logprobs"]
    assert shape["tokens"] == ["h", "i", "a"]
    assert shape["top_logprobs"] == [None, {"i": LOGPROB}, {"a": LOGPROB, "A": -65, "B": -66}]
    for chat in (
        (await answer(client, CHATS, {**CHAT, **wanted, "logprobs": True}))["choices"][0],
        (await chunks(client, CHATS, {**CHAT, **wanted, "logprobs": True}))[1]["choices"][0],
    ):
        entry = chat["logprobs"]["content"][0]
        assert [other["token"] for other in entry["top_logprobs"]] == ["a", "A", "B"]
    (chunk,) = await chunks(client, COMPLETIONS, {**TEXT, **wanted})
    assert chunk["choices"][0]["logprobs"]["top_logprobs"] == [{"a": LOGPROB, "A": -65, "B": -66}]


async def test_named_tokens_that_are_wrong(client):
    assert (await refusal(client, CHATS, {**CHAT, "logprob_token_ids": [1]}))["param"] == "logprob_token_ids"
    assert (await refusal(client, COMPLETIONS, {**TEXT, "logprob_token_ids": [-1]}))[
        "param"
    ] == "logprob_token_ids"
    error = await refusal(client, COMPLETIONS, {**TEXT, "logprob_token_ids": [1, 2], "logprobs": 1})
    assert error["param"] == "logprobs"
    assert (
        "token_ids"
        not in (await answer(client, COMPLETIONS, {**TEXT, "logprob_token_ids": []}))["choices"][0]
    )


async def test_several_samples_at_the_model_s_own_temperature_0(client, engine):
    engine.frontend.sampling_defaults = {"temperature": 0.0}
    for route, body in ((COMPLETIONS, TEXT), (CHATS, CHAT)):
        assert len((await answer(client, route, {**body, "n": 2}))["choices"]) == 2
        error = await refusal(client, route, {**body, "n": 2, "temperature": 0})
        assert "n must be 1 with temperature 0" in error["message"]


async def test_beams(client, engine):
    """Each token offers itself and "Z", which is likelier."""
    engine.script = lambda prompt, params: say("a", "length")
    body = {**TEXT, "use_beam_search": True, "n": 2, "max_tokens": 2, "return_token_ids": True}
    found = await answer(client, COMPLETIONS, body)
    assert [choice["text"] for choice in found["choices"]] == ["ZZ", "Za"]
    assert [choice["token_ids"] for choice in found["choices"]] == [[90, 90], [90, 97]]
    assert [choice["finish_reason"] for choice in found["choices"]] == ["length", "length"]
    assert found["usage"]["completion_tokens"] == 4
    assert [request.prompt.token_ids for request in engine.requests] == [
        list(b"hi"),
        list(b"hiZ"),
        list(b"hia"),
    ]
    assert {request.params.logprobs for request in engine.requests} == {4}
    chat = await answer(client, CHATS, {**CHAT, "use_beam_search": True, "max_tokens": 1})
    assert chat["choices"][0]["message"]["content"] == "Z"


async def test_steps_of_beams_are_not_counted_as_requests(client, engine):
    body = {**TEXT, "prompt": ["hi", "ho"], "use_beam_search": True, "n": 2, "max_tokens": 2}
    await answer(client, COMPLETIONS, body)
    assert {request.counted for request in engine.requests} == {False}
    values = {value.name: value for value in engine.metrics.values() if "finished_reason" not in value.labels}
    ends = {
        value.labels["finished_reason"]: value.value
        for value in engine.metrics.values()
        if "finished_reason" in value.labels
    }
    assert ends == {"stop": 0, "length": 2, "abort": 0, "error": 0}
    assert values["octavo_prompt_tokens_total"].value == 4
    assert values["octavo_generation_tokens_total"].value == 2 * 2 * 2


async def test_beams_that_end(client, engine):
    engine.script = lambda prompt, params: [Step("", [257], "length")]
    body = {**TEXT, "use_beam_search": True, "max_tokens": 1, "length_penalty": 0, "n": 2}
    choices = (await answer(client, COMPLETIONS, body))["choices"]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [
        ("Z", "length"),
        ("", "stop"),
    ]
    assert choices[1]["stop_reason"] == 257


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"logprobs": 0}, "logprobs"),
        ({"stop": ["a"]}, "stop"),
        ({"top_p": 0.5}, "top_p"),
        ({"echo": True}, "echo"),
        ({"n": 11}, "n"),
        ({"n": 0}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"length_penalty": 1e9}, "length_penalty"),
        ({"max_tokens": 63}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_beams_that_cannot_be_searched(client, fields, param):
    assert (await refusal(client, COMPLETIONS, {**TEXT, "use_beam_search": True, **fields}))["param"] == param


async def test_a_length_penalty_needs_beams(client):
    assert (await refusal(client, CHATS, {**CHAT, "length_penalty": 2}))["param"] == "length_penalty"
    await answer(client, CHATS, {**CHAT, "length_penalty": 1.0})
    neutral = {"top_p": 1, "top_k": -1, "stop": [], "stream": False, "presence_penalty": 0}
    await answer(client, CHATS, {**CHAT, "use_beam_search": True, "logprobs": False, **neutral})
