"""While the model loads: the progress that every route, the WebSocket and the page's feed tell."""

import json
import time
from typing import Any, cast

import httpx
import pytest
from documented import check
from hypothesis import given
from hypothesis import strategies as st
from listening_app import client as socket_client
from listening_app import serving
from scripted_engine import ScriptedEngine

from enginecore.messages import Loading, RankLoading
from octavo_serve.app import create_app
from octavo_serve.config import ServeConfig
from octavo_serve.loading import LoadProgress, load_progress

GENERATING = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    "/v1/embeddings": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104]},
}


def loading(phase: str, done: int = 0, total: int = 0, *, rank: int = 0, ago: float = 0.0) -> RankLoading:
    return RankLoading(rank, 0, time.monotonic() - ago, Loading(phase, done, total))


@pytest.fixture
def engine() -> ScriptedEngine:
    """It is at 41 % of its weights, after a while."""
    engine = ScriptedEngine()
    engine.is_ready = False
    engine.ranks_loading[0] = loading("reading weights, file 3 of 7", 41, 100, ago=8200.0)
    return engine


@pytest.mark.anyio
async def test_health_tells_the_progress(client, engine):
    for route in ("/health", "/ping"):
        response = await client.get(route)
        assert response.status_code == 503
        body = response.json()
        check((await client.get("/openapi.json")).json(), "Unhealthy", body)
        assert body["error"]["code"] == "model_loading"
        assert body["error"]["type"] == "server_error"
        assert body["error"]["message"].startswith(
            "the model is loading: reading weights, file 3 of 7, 41 %, for "
        )
        told = body["loading"]
        assert (told["phase"], told["percent"], told["ranks_loading"]) == (
            "reading weights, file 3 of 7",
            41,
            1,
        )
        assert 8200 <= told["elapsed_seconds"] <= time.monotonic() - engine.ranks_loading[0].began + 0.1
        assert response.headers["retry-after"] == "60"


@pytest.mark.anyio
@pytest.mark.parametrize("path", GENERATING)
async def test_who_asks_too_early_is_told_the_phase_and_when_to_come_again(client, engine, path):
    response = await client.post(path, json=GENERATING[path])
    assert response.status_code == 503
    assert response.headers["retry-after"] == "60"
    error = response.json()["error"]
    assert "reading weights, file 3 of 7, 41 %" in error["message"]
    if path == "/v1/messages":
        assert error["type"] == "overloaded_error"
    else:
        assert (error["type"], error["code"]) == ("server_error", "model_loading")


@pytest.mark.anyio
async def test_models_wait_too_and_metrics_answer(client):
    response = await client.get("/v1/models")
    assert (response.status_code, response.headers["retry-after"]) == (503, "60")
    assert "reading weights" in response.json()["error"]["message"]
    metrics = await client.get("/metrics")
    assert metrics.status_code == 200
    assert 'octavo_engine_up{engine="0",model_name="tiny"} 0.0' in metrics.text


@pytest.mark.anyio
async def test_then_all_is_well(client, engine):
    engine.ranks_loading.clear()
    engine.is_ready = True
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200


@pytest.mark.anyio
async def test_other_troubles_are_not_loading(client, engine):
    engine.die("killed by signal 9")
    for response in (await client.get("/health"), await client.post("/v1/completions", json={"prompt": "a"})):
        assert response.status_code == 503
        assert "retry-after" not in response.headers
        assert response.json()["error"]["code"] is None


@pytest.mark.anyio
async def test_the_socket_refuses_and_shows_the_progress(engine):
    app = create_app(cast(Any, engine), ServeConfig())
    async with serving(app) as address, socket_client(address) as client:
        await client.send("completion", "a", prompt="hi")
        refused = (await client.until_end("a"))[-1]["error"]
        assert refused["code"] == "model_loading"
        assert "reading weights, file 3 of 7, 41 %" in refused["message"]
        await client.send("watch", "b")
        frame = await client.receive()
        assert frame["trouble"].startswith("the model is loading: reading weights")
        assert frame["max_model_len"] is None
        assert (frame["loading"]["phase"], frame["loading"]["percent"]) == (
            "reading weights, file 3 of 7",
            41,
        )
        engine.ranks_loading.clear()
        engine.is_ready = True
        while (frame := await client.receive())["trouble"] is not None:
            pass
        assert (frame["loading"], frame["max_model_len"]) == (None, 64)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s") as http:
        check((await http.get("/openapi.json")).json(), "EngineFrame", json.loads(json.dumps(frame)))


def test_the_slowest_of_several_ranks_is_told():
    ranks = {
        0: loading("recording the layers", rank=0),
        1: loading("reading weights", 3, 4, rank=1),
        2: loading("reading weights", 1, 4, rank=2),
    }
    ranks.pop(0)
    found = load_progress(ranks)
    assert found is not None
    assert (found.phase, found.percent, found.ranks_loading) == ("reading weights", 25, 2)
    assert "25 %" in str(found)
    assert "slowest of 2 ranks" in str(found)
    assert load_progress({}) is None


@given(st.none() | st.integers(0, 100), st.floats(0, 1e6))
def test_when_to_come_again_is_bounded(percent, elapsed):
    seconds = LoadProgress("reading weights", percent, elapsed, 1).retry_after()
    assert 1 <= seconds <= 60
    if percent and elapsed * (100 - percent) / percent <= 60:
        assert seconds >= elapsed * (100 - percent) / percent
