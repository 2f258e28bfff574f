"""The bytes of event streams."""

import json
import math
import re
from typing import Any, cast

import httpx
import pytest
from caller import Caller
from scripted_engine import Step, say

from enginecore.errors import RequestAbortedError
from octavo_serve import answers
from octavo_serve.app import create_app
from octavo_serve.config import ServeConfig

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
TEXT = {"prompt": "hi", "stream": True}


async def stream(client: httpx.AsyncClient, route: str, body: dict[str, Any]) -> str:
    response = await client.post(route, json=body)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return response.text


def chunks(text: str) -> list[dict[str, Any]]:
    """The JSON of each event before the one that ends the stream, whose shape is checked."""
    assert text.endswith("\n\n")
    events = text.removesuffix("\n\n").split("\n\n")
    assert [event for event in events if not event.startswith("data: ") or "\n" in event] == []
    assert [event == "data: [DONE]" for event in events] == [False] * (len(events) - 1) + [True]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def start_of(text: str, prefix: str, kind: str, model: str) -> str:
    """What every chunk begins with, once the parts that differ between runs are found in the first."""
    named = rf'"id":"{prefix}-[0-9a-f]{{32}}","object":"{kind}","created":\d+,"model":"{model}"'
    found = re.match(rf'data: (\{{{named},"choices":\[)', text)
    assert found is not None, text
    return found[1]


async def test_chat_stream_is_exactly_this(client, engine):
    engine.script = lambda prompt, params: say("a\n🌶")
    text = await stream(client, "/v1/chat/completions", {**CHAT, "model": "alias"})
    start = start_of(text, "chatcmpl", "chat.completion.chunk", "alias")
    choices = [
        '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}',
        '{"index":0,"delta":{"content":"a"},"logprobs":null,"finish_reason":null}',
        '{"index":0,"delta":{"content":"\\n"},"logprobs":null,"finish_reason":null}',
        '{"index":0,"delta":{"content":"🌶"},"logprobs":null,"finish_reason":null}',
        '{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null}',
    ]
    assert text == "".join(f"data: {start}{choice}]}}\n\n" for choice in choices) + "data: [DONE]\n\n"


async def test_completion_stream_is_exactly_this(client, engine):
    engine.script = lambda prompt, params: [Step("ab"), Step("c", finish_reason="stop", stop_reason="STOP")]
    text = await stream(client, "/v1/completions", TEXT)
    start = start_of(text, "cmpl", "text_completion", "tiny")
    choices = [
        '{"index":0,"text":"ab","logprobs":null,"finish_reason":null}',
        '{"index":0,"text":"c","logprobs":null,"finish_reason":"stop","stop_reason":"STOP"}',
    ]
    assert text == "".join(f"data: {start}{choice}]}}\n\n" for choice in choices) + "data: [DONE]\n\n"


async def test_each_choice_finishes_once_even_when_it_is_empty(client, engine):
    engine.script = lambda prompt, params: say("")
    for route, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        found = chunks(await stream(client, route, {**body, "n": 2, "temperature": 1}))
        endings = [c["index"] for chunk in found for c in chunk["choices"] if c["finish_reason"] is not None]
        assert sorted(endings) == [0, 1]
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in found}) == 1


async def test_several_prompts_stream_beside_each_other(client, engine):
    engine.script = lambda prompt, params: say(prompt.text * 2)
    found = chunks(await stream(client, "/v1/completions", {"prompt": ["x", "y"], "stream": True, "n": 2}))
    texts = dict.fromkeys(range(4), "")
    for chunk in found:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "xx", 1: "xx", 2: "yy", 3: "yy"}


async def test_held_back_text_makes_no_chunk(client, engine):
    engine.script = lambda prompt, params: [Step("", [240]), Step("", [159]), Step("🌶", [140, 182], "length")]
    found = chunks(await stream(client, "/v1/completions", TEXT))
    assert [chunk["choices"][0]["text"] for chunk in found] == ["🌶"]


USAGE = {
    "prompt_tokens": 2,
    "completion_tokens": 3,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 1},
}


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
async def test_no_usage_unless_asked_for(client, options):
    found = chunks(await stream(client, "/v1/completions", {**TEXT, "stream_options": options}))
    assert [chunk for chunk in found if "usage" in chunk or not chunk["choices"]] == []


async def test_usage_comes_once_at_the_end(client, engine):
    engine.cached = 1
    body = {**TEXT, "stream_options": {"include_usage": True}}
    found = chunks(await stream(client, "/v1/completions", body))
    assert [chunk["usage"] for chunk in found] == [None, None, None, USAGE]
    assert found[-1]["choices"] == []


async def test_continuous_usage_counts_up(client):
    body = {**TEXT, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    found = chunks(await stream(client, "/v1/completions", body))
    assert [chunk["usage"]["completion_tokens"] for chunk in found] == [1, 2, 3, 3]


async def test_usage_counts_the_prompt_once_and_every_sample(client):
    body = {**TEXT, "n": 2, "stream_options": {"include_usage": True}}
    streamed = chunks(await stream(client, "/v1/completions", body))[-1]["usage"]
    whole = (await client.post("/v1/completions", json={"prompt": "hi", "n": 2})).json()["usage"]
    assert streamed == whole
    assert (whole["prompt_tokens"], whole["completion_tokens"]) == (2, 6)


async def test_a_stream_that_fails_validation_is_no_stream(client):
    for body in (
        {**TEXT, "n": 0},
        {**TEXT, "prompt": ""},
        {**TEXT, "prompt": [400]},
        {**TEXT, "prompt_logprobs": 1},
    ):
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 400
        assert response.headers["content-type"] == "application/json"
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_engine_death_before_the_first_token_has_a_status(client, engine):
    engine.script = lambda prompt, params: [Step("", [], "error", "the core gave up")]
    response = await client.post("/v1/completions", json=TEXT)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the core gave up"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("route", "param"), [("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")]
)
async def test_a_length_that_only_the_engine_refuses_is_the_clients_fault(
    client, engine, route, param, streamed
):
    message = "This model's maximum context length is 64 tokens. However, there are 3 KV blocks."
    engine.script = lambda prompt, params: [Step("", [], "error", message)]
    body = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "stream": streamed}
    response = await client.post(route, json=body)
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": message,
        "type": "invalid_request_error",
        "param": param,
        "code": "context_length_exceeded",
    }


async def test_an_error_after_the_first_token_ends_the_stream(client, engine):
    engine.script = lambda prompt, params: [Step("a"), Step("", [], "error", "the core gave up")]
    first, error = chunks(await stream(client, "/v1/completions", TEXT))
    assert first["choices"][0]["text"] == "a"
    assert error == {
        "error": {"message": "the core gave up", "type": "server_error", "param": None, "code": None}
    }


async def test_a_queued_stream_is_kept_open_by_comments(engine, monkeypatch):
    monkeypatch.setattr(answers, "_SECONDS_OF_SILENCE", 0.01)
    engine.allowed = 0
    caller = Caller(create_app(cast(Any, engine), ServeConfig()), TEXT)
    await caller.received(3)
    engine.allow(math.inf)
    await caller.task
    assert caller.messages[0]["status"] == 200
    comments, events = caller.body.decode().rpartition(": waiting\n\n")[::2]
    assert set(comments.split("\n\n")) <= {": waiting", ""}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks(events)) == "ab"


@pytest.mark.parametrize("dies", [False, True])
async def test_an_error_after_comments_is_an_event(engine, monkeypatch, dies):
    monkeypatch.setattr(answers, "_SECONDS_OF_SILENCE", 0.01)
    engine.allowed = 0
    caller = Caller(create_app(cast(Any, engine), ServeConfig()), TEXT)
    await caller.received(2)
    if dies:
        engine.die("killed by signal 9")
    else:
        engine.interrupt(engine.streams[0], RequestAbortedError("shutting down"))
    await caller.task
    last = caller.body.decode().strip().split("\n\n")[-2]
    assert ("killed by signal 9" if dies else '"finish_reason":"abort"') in last


async def test_echo_comes_first(client, engine):
    found = chunks(await stream(client, "/v1/completions", {**TEXT, "echo": True, "logprobs": 0}))
    assert [chunk["choices"][0]["text"] for chunk in found] == ["hi", "a", "b", ""]
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in found]
    assert [entry["text_offset"] for entry in logprobs] == [[0, 1], [2], [3], [4]]
    assert logprobs[0]["token_logprobs"][0] is None


async def test_each_choice_has_the_logprobs_of_the_echo(client):
    """Only the first output of a prompt brings them, and the choices need not begin with the same one."""
    body = {**TEXT, "prompt": ["hi", "you"], "n": 2, "echo": True, "logprobs": 0}
    found = chunks(await stream(client, "/v1/completions", body))
    tokens: dict[int, list[str]] = {}
    offsets: dict[int, list[int]] = {}
    for choice in (chunk["choices"][0] for chunk in found):
        tokens.setdefault(choice["index"], []).extend(choice["logprobs"]["tokens"])
        offsets.setdefault(choice["index"], []).extend(choice["logprobs"]["text_offset"])
    assert [tokens[index][:-1] for index in range(4)] == [list("hiab")] * 2 + [list("youab")] * 2
    assert [offsets[index][:-1] for index in range(4)] == [[0, 1, 2, 3]] * 2 + [[0, 1, 2, 3, 4]] * 2


async def test_echo_without_generation(client):
    found = chunks(await stream(client, "/v1/completions", {**TEXT, "echo": True, "max_tokens": 0}))
    choices = [chunk["choices"][0] for chunk in found]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [("hi", None), ("", "length")]


async def test_chat_logprobs_in_a_stream(client):
    body = {**CHAT, "logprobs": True, "top_logprobs": 1, "max_tokens": 1}
    role, token = chunks(await stream(client, "/v1/chat/completions", body))
    assert role["choices"][0]["logprobs"] is None
    assert token["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "a",
                "logprob": pytest.approx(-0.693147),
                "bytes": [97],
                "top_logprobs": [{"token": "Z", "logprob": -0.25, "bytes": [90]}],
            }
        ]
    }
