"""Bounds on what clients may ask for at a time."""

import asyncio
import contextlib
from typing import Any, cast

import httpx
import pytest
from scripted_engine import ScriptedEngine

from enginecore.errors import ConfigError
from enginecore.messages import EngineStats
from octavo_serve.app import create_app
from octavo_serve.config import ServeConfig
from octavo_serve.errors import ApiError
from octavo_serve.limits import Limits, make_counts

pytestmark = pytest.mark.anyio


def client_of(engine: ScriptedEngine, **options) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(cast(Any, engine), ServeConfig(**options)))
    return httpx.AsyncClient(transport=transport, base_url="http://server")


def test_the_queue_is_as_long_as_max_queue_beyond_what_runs():
    limits = Limits(ServeConfig(max_queue=3), [])
    limits.note_load(waiting=3, unfinished=5)
    # Two run, and of four seats two are free for those that wait.
    limits.check_queue(2, seats=4, queue_seconds=0)
    for new, seats, seconds, said in ((3, 4, 0.0, "1"), (1, 2, 7.2, "8"), (1, 0, 900, "60")):
        with pytest.raises(ApiError, match="max_queue is 3") as refused:
            limits.check_queue(new, seats=seats, queue_seconds=seconds)
        assert refused.value.status == 429
        assert dict(refused.value.headers or {}) == {"Retry-After": said}
    limits.note_load(waiting=0, unfinished=0)
    limits.check_queue(3, seats=0, queue_seconds=900)


def test_processes_count_together(tmp_path):
    options = ServeConfig(max_queue=5, api_key=("a", "b"), max_requests_per_key=2)
    names = list(options.keys())
    make_counts(tmp_path / "counts", 2, len(names))
    first, second = (Limits(options, names, tmp_path / "counts", index) for index in range(2))
    first.note_load(waiting=3, unfinished=3)
    second.check_queue(2, seats=0, queue_seconds=0)
    with pytest.raises(ApiError):
        second.check_queue(3, seats=0, queue_seconds=0)

    with contextlib.ExitStack() as held:
        held.enter_context(first.one_more("key 1"))
        held.enter_context(second.one_more("key 1"))
        for limits in (first, second):
            with pytest.raises(ApiError, match="max_requests_per_key is 2"), limits.one_more("key 1"):
                raise AssertionError
            with limits.one_more("key 2"):
                pass
        # A process that has died and was started again has nothing going on.
        Limits(options, names, tmp_path / "counts", 1)
        with first.one_more("key 1"):
            pass
    with first.one_more("key 1"), first.one_more("key 1"):
        pass


async def test_a_full_queue_is_a_429_for_streams_too(engine):
    engine.stats = EngineStats(waiting=1)
    engine.queue_seconds = 2.5
    async with client_of(engine, max_queue=2) as client:
        engine.on_load(2, 3)
        for stream in (False, True):
            for path, body in (
                ("/v1/completions", {"prompt": "hi"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
            ):
                response = await client.post(path, json=body | {"stream": stream})
                assert (response.status_code, response.headers["retry-after"]) == (429, "3")
                assert response.json()["error"]["code"] == "queue_full"
                assert "2 requests wait, and max_queue is 2" in response.json()["error"]["message"]
        engine.on_load(1, 2)
        assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200
        assert (await client.post("/v1/completions", json={"prompt": ["a", "b"]})).status_code == 429


def test_who_waits_for_a_free_seat_is_not_said_to_be_in_the_queue():
    """Requests that were submitted together all wait for their first step, though some have seats."""
    limits = Limits(ServeConfig(max_queue=2), [])
    limits.note_load(6, 6)
    with pytest.raises(ApiError, match="2 requests wait, and max_queue is 2"):
        limits.check_queue(1, 4, 0.0)
    limits.check_queue(1, 5, 0.0)


async def test_a_key_has_its_places_back_when_its_requests_end(engine):
    engine.allowed = 0
    options = {"api_key": ("one", "two"), "max_requests_per_key": 2}
    async with client_of(engine, **options) as client:

        async def ask(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return (await client.post("/v1/completions", json={"prompt": "hi"}, headers=headers)).status_code

        running = [asyncio.create_task(ask("one")) for _ in range(2)]
        while len(engine.streams) < 2:
            await asyncio.sleep(0)
        assert await ask("one") == 429
        others = asyncio.create_task(ask("two"))
        while len(engine.streams) < 3:
            await asyncio.sleep(0)
        engine.allow(100)
        for stream in engine.streams:
            stream.wake()
        assert await asyncio.gather(*running, others) == [200, 200, 200]
        assert await ask("one") == 200


def test_keys_have_names(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# for the log\nalice: sk-1\n\n sk-2 \r\nbob:sk-3\n")
    options = ServeConfig(api_key=("sk-0\n",), api_key_file=str(path))
    assert options.keys() == {"key 1": "sk-0", "alice": "sk-1", "key 3": "sk-2", "bob": "sk-3"}
    for content, said in (("", "holds no key"), ("a: x\na: y", "not the only one"), ("a:", "is empty")):
        path.write_text(content)
        with pytest.raises(ConfigError, match=said):
            ServeConfig(api_key_file=str(path)).keys()


async def test_each_key_is_let_in_and_named_in_the_log(engine, caplog, tmp_path):
    path = tmp_path / "keys"
    path.write_text("alice: sk-1\nbob: sk-2\n")
    caplog.set_level("INFO")
    async with client_of(engine, api_key_file=str(path)) as client:
        for headers, status in (
            ({"authorization": "Bearer sk-1"}, 200),
            ({"x-api-key": "sk-2"}, 200),
            ({"x-api-key": "sk-3"}, 401),
            ({"authorization": "Bearer sk-3", "x-api-key": "sk-1"}, 401),
        ):
            response = await client.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
            assert response.status_code == status
    keys = [record.fields.get("key") for record in caplog.records if record.getMessage() == "request"]
    assert keys == ["alice", "bob", None, None]
    assert "sk-" not in caplog.text


async def test_admin_routes_are_there_when_asked_for(engine):
    async with client_of(engine) as client:
        assert (await client.post("/reset_prefix_cache")).status_code == 404
    async with client_of(engine, admin_routes=True) as client:
        assert (await client.post("/reset_prefix_cache")).status_code == 200
    assert engine.prefix_cache_resets == 1


async def test_every_answer_has_a_request_id(engine):
    async with client_of(engine) as client:
        for method, path in (("GET", "/health"), ("GET", "/nothing"), ("POST", "/v1/completions")):
            response = await client.request(method, path, json={"prompt": "hi", "max_tokens": 1})
            assert len(response.headers["x-request-id"]) == 32
            given = {"x-request-id": "mine-1.2"}
            response = await client.request(method, path, json={"prompt": "hi"}, headers=given)
            assert response.headers["x-request-id"] == "mine-1.2"
        response = await client.post(
            "/v1/completions", json={"prompt": "hi"}, headers={"x-request-id": "a" * 200}
        )
        assert len(response.headers["x-request-id"]) == 32
        assert response.json()["id"] == "cmpl-" + response.headers["x-request-id"]


@pytest.mark.parametrize("stripped", [True, False])
async def test_routes_below_a_path_of_a_proxy(engine, stripped):
    async with client_of(engine, root_path="/llm", api_key=("k",)) as client:
        prefix = "" if stripped else "/llm"
        assert (await client.get(f"{prefix}/health")).status_code == 200
        assert (await client.get(f"{prefix}/v1/models")).status_code == 401
        headers = {"authorization": "Bearer k"}
        assert (await client.get(f"{prefix}/v1/models", headers=headers)).status_code == 200
        schema = (await client.get(f"{prefix}/openapi.json", headers=headers)).json()
        assert {"url": "/llm"} in schema["servers"]
