"""Clients that leave, and the server that stops: whatever is not finished is aborted."""

import asyncio
import json

import pytest
from caller import Caller
from scripted_engine import ScriptedEngine, say

from enginecore.errors import RequestAbortedError
from octavo_serve.app import create_app
from octavo_serve.config import ServeConfig

pytestmark = pytest.mark.anyio


@pytest.fixture
def engine() -> ScriptedEngine:
    engine = ScriptedEngine(script=lambda prompt, params: say("abcdef"))
    engine.allowed = 0
    return engine


@pytest.fixture
def app(engine):
    return create_app(engine, ServeConfig())


async def submitted(engine: ScriptedEngine, count: int) -> None:
    """Wait until so many prompts have reached the engine."""
    while len(engine.requests) < count:
        await asyncio.sleep(0)


async def test_leaving_a_stream_aborts_it(app, engine):
    caller = Caller(app, {"prompt": "hi", "stream": True})
    engine.allowed = 3
    await caller.received(4)
    caller.leave()
    await caller.task
    assert engine.aborted == [request.request_id for request in engine.requests]
    assert app.state.server.streams == set()
    assert b"[DONE]" not in caller.body


async def test_leaving_before_the_first_token_aborts(app, engine):
    for body in (
        {"stream": True},
        {},
        {"n": 4},
        {"prompt": ["a", "b", "c"]},
        {"prompt": ["a"], "stream": True},
    ):
        caller = Caller(app, {"prompt": "hi", **body})
        await submitted(engine, len(engine.requests) + 1)
        caller.leave()
        await caller.task
        assert caller.messages == []
        assert all(stream.ended for stream in engine.streams)
    assert sorted(engine.aborted) == sorted(request.request_id for request in engine.requests)


async def test_leaving_while_the_server_waits_to_send(app, engine):
    caller = Caller(app, {"prompt": ["a", "b"], "stream": True})
    caller.reading.clear()
    engine.allowed = 2
    await submitted(engine, 2)
    while engine.given < 1:
        await asyncio.sleep(0)
    caller.leave()
    await caller.task
    assert len(engine.aborted) == 2


async def test_a_finished_request_is_not_aborted(app, engine):
    engine.allow(100)
    for body in ({"stream": True}, {}, {"prompt": ["a", "b"], "stream": True}):
        caller = Caller(app, {"prompt": "hi", **body})
        await caller.task
        assert caller.messages[0]["status"] == 200
    assert engine.aborted == []


async def test_a_refused_prompt_takes_its_siblings_along(app, engine):
    caller = Caller(app, {"prompt": [[1], [2], [400]]})
    await caller.task
    assert caller.messages[0]["status"] == 400
    assert engine.requests == []


async def test_two_requests_of_one_id_are_told_apart(app, engine):
    callers = [Caller(app, {"prompt": "hi", "stream": True}, {"x-request-id": "same"}) for _ in range(2)]
    await submitted(engine, 2)
    callers[0].leave()
    await callers[0].task
    engine.allow(100)
    await callers[1].task
    assert callers[1].body.count(b'"id":"cmpl-same"') == 7
    assert len(engine.aborted) == 1


def interrupt(app):
    server = app.state.server
    for stream in list(server.streams):
        server.engine.interrupt(stream, RequestAbortedError("the server is shutting down"))


async def test_interrupted_streams_end_with_abort(app, engine):
    caller = Caller(app, {"prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}})
    await submitted(engine, 2)
    engine.allow(1)
    await caller.received(2)
    server = app.state.server
    server.draining = True
    interrupt(app)
    await caller.task
    events = caller.body.decode().removesuffix("\n\n").split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    endings = {
        choice["index"]: choice["finish_reason"] for chunk in chunks[1:] for choice in chunk["choices"]
    }
    assert endings == {0: "abort", 1: "abort"}
    assert chunks[-1]["usage"]["completion_tokens"] == 1
    assert events[-1] == "data: [DONE]"
    assert len(engine.aborted) == 2


async def test_an_interrupted_message_ends_with_an_error(app, engine):
    """HC-54: Anthropic's API has no stop reason for an answer that was given up."""
    body = {"max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    caller = Caller(app, body, path="/v1/messages")
    await submitted(engine, 1)
    engine.allow(2)
    await caller.received(3)
    interrupt(app)
    await caller.task
    lines = [line for line in caller.body.decode().split("\n") if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [event["type"] for event in events if event["type"] != "content_block_delta"] == [
        "message_start",
        "content_block_start",
        "error",
    ]
    assert "shutting down" in events[-1]["error"]["message"]


async def test_beams_go_on_while_the_server_drains(app, engine):
    """HC-54: each round is a request to the engine, and only the first could be refused."""
    engine.script = lambda prompt, params: say("a", "length")
    caller = Caller(app, {"prompt": "hi", "use_beam_search": True, "n": 2, "max_tokens": 3})
    await submitted(engine, 1)
    app.state.server.draining = True
    engine.allow(100)
    await caller.task
    assert caller.messages[0]["status"] == 200
    assert [choice["text"] for choice in json.loads(caller.body)["choices"]] == ["ZZZ", "ZZa"]


async def test_leaving_a_beam_search_counts_one_abort(app, engine):
    engine.script = lambda prompt, params: say("a", "length")
    caller = Caller(app, {"prompt": "hi", "use_beam_search": True, "n": 2, "max_tokens": 3})
    await submitted(engine, 1)
    engine.allow(1)
    await submitted(engine, 3)
    caller.leave()
    await caller.task
    values = (value for value in engine.metrics.values() if value.name == "octavo_request_success_total")
    assert {value.labels["finished_reason"]: value.value for value in values if value.value} == {"abort": 1}


async def test_interrupted_before_the_first_token(app, engine):
    callers = [Caller(app, {"prompt": "hi", "stream": stream}) for stream in (True, False)]
    await submitted(engine, 2)
    interrupt(app)
    for caller in callers:
        await caller.task
        assert caller.messages[0]["status"] == 503
        assert b"shutting down" in caller.body


async def test_engine_death_fails_what_runs(app, engine):
    running, queued = (Caller(app, {"prompt": "hi", "stream": True}) for _ in range(2))
    await submitted(engine, 2)
    engine.allow(1)
    await running.received(2)
    engine.die("killed")
    await running.task
    await queued.task
    assert b'"error":{"message":"killed","type":"server_error"' in running.body
    assert running.body.endswith(b"data: [DONE]\n\n")
    assert queued.messages[0]["status"] == 503


async def test_an_incomplete_body_is_dropped(app, engine):
    caller = Caller(app, {})
    caller._unread[0] |= {"more_body": True}
    caller.leave()
    await caller.task
    assert engine.requests == []
