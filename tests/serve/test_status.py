"""Routes that tell about the server, and who may call which."""

import asyncio
import re
import threading
from typing import Any, cast

import httpx
import pytest
from scripted_engine import ScriptedEngine

import enginecore
from enginecore.messages import EngineStats
from octavo_serve.app import create_app
from octavo_serve.config import ServeConfig

pytestmark = pytest.mark.anyio


def client_of(engine: ScriptedEngine, **options) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(cast(Any, engine), ServeConfig(**options)))
    return httpx.AsyncClient(transport=transport, base_url="http://server")


async def test_models(client):
    cards = (await client.get("/v1/models")).json()
    assert cards["object"] == "list"
    assert [(card["id"], card["root"], card["max_model_len"]) for card in cards["data"]] == [
        ("tiny", "models/tiny", 64),
        ("alias", "models/tiny", 64),
    ]
    assert (await client.get("/v1/models/alias")).json() == cards["data"][1]
    missing = await client.get("/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_model_without_given_names_goes_by_its_own(engine):
    async with client_of(engine) as client:
        assert (await client.get("/v1/models/models/tiny")).json()["id"] == "models/tiny"


async def test_health_follows_the_engine(client, engine):
    for route in ("/health", "/ping"):
        assert (await client.get(route)).status_code == 200
    engine.is_ready = False
    response = await client.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "the model is loading"
    engine.die("killed by signal 9")
    response = await client.get("/health")
    assert response.status_code == 503
    assert "killed by signal 9" in response.json()["error"]["message"]


async def test_nothing_generates_while_the_model_loads(client, engine):
    engine.is_ready = False
    for method, route in (
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/v1/models"),
    ):
        response = await client.request(method, route, json={})
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "server_error"
    for route in ("/version", "/load", "/metrics"):
        assert (await client.get(route)).status_code == 200


async def test_version_and_load(client, engine):
    assert (await client.get("/version")).json() == {"version": enginecore.__version__}
    engine.stats = EngineStats(running=3, waiting=2, free_blocks=32, num_blocks=64)
    engine.allowed = 0
    request = asyncio.create_task(client.post("/v1/completions", json={"prompt": "hi"}))
    while not engine.streams:
        await asyncio.sleep(0)
    assert (await client.get("/load")).json() == {
        "server_load": 1,
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "kv_cache_usage": 0.5,
    }
    engine.allow(1)
    assert (await request).status_code == 200
    assert (await client.get("/load")).json()["server_load"] == 0


async def test_metrics(client):
    response = await client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'octavo_num_requests_running{engine="0",model_name="tiny"} 0.0' in response.text


async def test_http_requests_are_counted_by_route_and_status(client):
    for _ in range(2):
        assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200
    await client.post("/v1/completions", json={"prompt": ""})
    await client.get("/v1/completions")
    await client.get("/v1/models/alias")
    for path in ("/a", "/b", "/v1/models/none"):
        await client.get(path)
    text = (await client.get("/metrics")).text
    counts = re.findall(
        r'^http_requests_total{handler="(.*)",method="(.*)",status="(.*)"} (.*)$', text, re.MULTILINE
    )
    assert sorted(counts) == [
        ("/v1/completions", "GET", "405", "1.0"),
        ("/v1/completions", "POST", "200", "2.0"),
        ("/v1/completions", "POST", "400", "1.0"),
        ("/v1/models/{name:path}", "GET", "200", "1.0"),
        ("/v1/models/{name:path}", "GET", "404", "1.0"),
        ("none", "GET", "404", "2.0"),
    ]


async def test_api_key(engine):
    async with client_of(engine, api_key=("secret",)) as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            response = await client.get("/v1/models", headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        right = {"authorization": "Bearer secret"}
        assert (await client.get("/v1/models", headers=right)).status_code == 200
        for route in ("/health", "/ping", "/metrics"):
            assert (await client.get(route)).status_code == 200


async def test_cors_is_off_unless_asked_for(engine):
    headers = {"origin": "http://page"}
    async with client_of(engine) as client:
        assert "access-control-allow-origin" not in (await client.get("/health", headers=headers)).headers
    async with client_of(engine, cors_origins=("http://page",), api_key=("secret",)) as client:
        response = await client.get("/health", headers=headers)
        assert response.headers["access-control-allow-origin"] == "http://page"
        preflight = {**headers, "access-control-request-method": "POST"}
        assert (await client.options("/v1/completions", headers=preflight)).status_code == 200


async def test_tokenize(client):
    response = await client.post("/tokenize", json={"prompt": "hi", "return_token_strs": True})
    assert response.json() == {
        "count": 3,
        "max_model_len": 64,
        "tokens": [256, 104, 105],
        "token_strs": ["<256>", "h", "i"],
    }
    response = await client.post("/tokenize", json={"prompt": "hi", "add_special_tokens": False})
    assert response.json()["tokens"] == [104, 105]
    response = await client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})
    text = "user: hi\n"
    assert response.json()["tokens"] == list(text.encode())


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"documents": [{"text": "d"}], "add_special_tokens": True},
    ],
    ids=str,
)
async def test_tokenize_makes_the_prompt_that_a_chat_runs(client, engine, extra):
    body = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}], **extra}
    tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
    assert (await client.post("/v1/chat/completions", json={**body, "max_tokens": 1})).status_code == 200
    assert tokens == list(engine.requests[-1].prompt.token_ids)


async def test_tokenize_refuses(client):
    messages = [{"role": "user", "content": "hi"}]
    both = {"prompt": "hi", "messages": messages}
    wrong_model = {"prompt": "hi", "model": 1}
    own_template = {"messages": messages, "chat_template_kwargs": {"chat_template": ""}}
    for body in ({}, {"messages": []}, {"prompt": 5}, both, wrong_model, own_template):
        assert (await client.post("/tokenize", json=body)).status_code == 400
    assert (await client.post("/tokenize", json={"prompt": "hi", "model": "other"})).status_code == 404


async def test_detokenize(client):
    assert (await client.post("/detokenize", json={"tokens": [104, 105]})).json() == {"prompt": "hi"}
    assert (await client.post("/detokenize", json={"tokens": [104, 319]})).status_code == 200
    for tokens in ([-1], [320], [10**19], ["a"], None):
        response = await client.post("/detokenize", json={"tokens": tokens})
        assert response.json()["error"]["param"] == "tokens"


async def test_a_long_list_of_ids_is_turned_into_text_beside_the_event_loop(client, engine):
    response = await client.post("/detokenize", json={"tokens": [104] * 20_000})
    assert response.json() == {"prompt": "h" * 20_000}
    assert engine.frontend.detokenized_in not in (None, threading.current_thread())


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
async def test_many_bad_words_are_tokenised_beside_the_event_loop(client, engine, route):
    asking = (
        {"prompt": "a"} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    )
    words = [f"word{number}" for number in range(500)]
    assert (await client.post(route, json={**asking, "bad_words": words})).status_code == 200
    assert engine.frontend.tokenized_in not in (None, threading.current_thread())
    [request] = engine.requests
    assert request.bad_word_ids == [list(word.encode()) for word in words]
