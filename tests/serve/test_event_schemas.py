"""Every event of every stream, and every frame of the WebSocket, is what the OpenAPI document says."""

import copy
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple, cast

import httpx
import jsonschema
import pytest
from caller import Caller
from documented import Documented, check, event_schema
from listening_app import client as socket_client
from listening_app import serving
from scripted_engine import ScriptedEngine, say

from enginecore.errors import RequestAbortedError
from enginecore.frontend.parsing import REASONING_PARSERS, TOOL_PARSERS, Parsers
from octavo_serve.app import create_app
from octavo_serve.config import ServeConfig

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "f", "parameters": PARAMETERS}
MESSAGE_TOOLS = [{"name": "f", "input_schema": PARAMETERS}]
CHAT_TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
EVERYTHING = {"return_token_ids": True, "stream_options": {"include_usage": True}, "n": 2}

BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [{"prompt": "ab"}, {"prompt": ["a", "b"], "logprobs": 1, "echo": True, **EVERYTHING}],
    "/v1/chat/completions": [
        {"messages": HI, "logprobs": True, "top_logprobs": 2},
        {"messages": HI, **CHAT_TOOLS, **EVERYTHING},
        {"messages": HI, **CHAT_TOOLS, "tool_choice": "required"},
    ],
    "/v1/responses": [
        {"input": "hi", "top_logprobs": 1},
        {"input": "hi", "tools": [{"type": "function", **FUNCTION}], "metadata": {"a": "b"}},
        {"input": "hi", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
    ],
    "/v1/messages": [
        {"messages": HI},
        {"messages": HI, "tools": [{"name": "f", "input_schema": PARAMETERS}], "stop_sequences": ["S"]},
        {
            "messages": HI,
            "tools": [{"name": "f", "input_schema": PARAMETERS}],
            "tool_choice": {"type": "any"},
        },
    ],
}
LONGEST = {"/v1/responses": "max_output_tokens"}

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TEXTS = {
    "text": "ok, done",
    "empty": "",
    "reasoning": "<think>hm</think>",
    "everything": f"<think>hm</think>ok{CALL}{CALL}",
    "forced": '[{"name": "f", "parameters": {"a": 1}}]',
}


class Ending(NamedTuple):
    """How a stream ends: after so many outputs something happens to it."""

    name: str
    outputs: int | None = None


ENDINGS = [Ending("itself"), Ending("length", 12), Ending("abort", 30), Ending("death", 30)]


async def document_of(app: Any) -> dict[str, Any]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        return (await client.get("/openapi.json")).json()


def data_of(stream: str) -> list[dict[str, Any]]:
    """The data of each event, without the `[DONE]`; an event's name is its type."""
    found = []
    for event in stream.removesuffix("\n\n").split("\n\n"):
        *named, data = event.split("\n")
        data = data.removeprefix("data: ")
        if data == "[DONE]":
            continue
        found.append(json.loads(data))
        assert named == ([f"event: {found[-1]['type']}"] if named else [])
    return found


async def streamed(path: str, body: dict[str, Any], text: str, ending: Ending) -> list[dict[str, Any]]:
    """The events of a stream of `text`, one output a character."""
    engine = ScriptedEngine(script=lambda prompt, params: say(text))
    engine.frontend.parsers = Parsers(TOOL_PARSERS["hermes"], REASONING_PARSERS["qwen3"])
    limit = {LONGEST.get(path, "max_tokens"): ending.outputs if ending.name == "length" else 300}
    if ending.name in ("abort", "death"):
        engine.allowed = ending.outputs or 0
    app = create_app(cast(Any, engine), ServeConfig())
    caller = Caller(app, {**body, **limit, "stream": True}, path=path)
    if ending.name in ("abort", "death"):
        await caller.received(2)  # the status, and the first events
        for stream in engine.streams:
            if ending.name == "abort":
                engine.interrupt(cast(Any, stream), RequestAbortedError("the server is shutting down"))
            else:
                engine.die("killed by signal 9")
    await caller.task
    return data_of(caller.body.decode())


def wrong(event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Events that differ from a right one in one of the fields that all have."""
    for key in event:
        if key in ("usage", "prompt_token_ids"):  # of which some events have none
            continue
        without = copy.deepcopy(event)
        del without[key]
        yield without
        yield {**event, key: {"wrong": [True]}}
    yield {**event, "more": 1}


@pytest.fixture
async def document() -> AsyncIterator[dict[str, Any]]:
    yield await document_of(create_app(cast(Any, ScriptedEngine()), ServeConfig()))


@pytest.mark.parametrize("path", BODIES)
async def test_events_are_those_that_are_described(document, path):
    name = event_schema(document, path)
    described = document["components"]["schemas"][name].get("discriminator", {}).get("mapping", {})
    types = Documented(document)
    examples: dict[str, dict[str, Any]] = {}
    # All of them: each ending meets each text, as each body has it read, at another place.
    for ending, text, body in itertools.product(ENDINGS, TEXTS.values(), BODIES[path]):
        events = await streamed(path, body, text, ending)
        assert events
        for event in events:
            types.check(name, event)
            examples.setdefault(event.get("type", next(iter(event))), event)
    assert set(examples) == set(described or ["id", "error"])
    for event in examples.values():
        for other in wrong(event):
            with pytest.raises(jsonschema.ValidationError):
                types.check(name, other)


async def test_an_event_of_an_unknown_type_is_none(document):
    for path in ("/v1/responses", "/v1/messages"):
        with pytest.raises(jsonschema.ValidationError):
            check(document, event_schema(document, path), {"type": "ping", "sequence_number": 1})


async def test_a_wrong_field_deep_in_an_event_is_found(document):
    [made] = [
        event
        for event in await streamed("/v1/responses", BODIES["/v1/responses"][1], TEXTS["text"], ENDINGS[0])
        if event["type"] == "response.completed"
    ]
    check(document, "ResponseEvent", made)
    for change in (
        lambda event: event["response"].pop("usage"),
        lambda event: event["response"]["usage"].update(input_tokens="3"),
        lambda event: event["response"].update(status="in_progress"),
        lambda event: event["response"]["output"][0].update(role="user"),
        lambda event: event["response"]["output"][0]["content"][0].pop("annotations"),
    ):
        other = copy.deepcopy(made)
        change(other)
        with pytest.raises(jsonschema.ValidationError):
            check(document, "ResponseEvent", other)


class Sockets(NamedTuple):
    """The names of the types of both directions' frames."""

    receives: str
    sends: str


def sockets_of(document: dict[str, Any]) -> Sockets:
    described = document["x-websockets"]["/v1/stream"]
    return Sockets(*(described[key]["$ref"].rpartition("/")[2] for key in ("receives", "sends")))


def client_frame(document: dict[str, Any], frame: dict[str, Any]) -> None:
    """Compare a client's frame; bodies may hold fields that nobody names."""
    root = {"$ref": f"#/components/schemas/{sockets_of(document).receives}", **document}
    jsonschema.Draft202012Validator(root).validate(frame)


async def test_frames_are_those_that_are_described():
    engine = ScriptedEngine(script=lambda prompt, params: say(TEXTS["everything"]))
    engine.frontend.parsers = Parsers(TOOL_PARSERS["hermes"], REASONING_PARSERS["qwen3"])
    app = create_app(cast(Any, engine), ServeConfig(api_key=("k",)))
    document = await document_of(app)
    sent = [
        {"type": "auth", "key": "k"},
        {"type": "completion", "id": "a", "prompt": "hi", "logprobs": 1, **EVERYTHING},
        {"type": "chat", "id": "b", "messages": HI, **CHAT_TOOLS, "max_tokens": 200, "stream": True},
        {"type": "chat", "id": "c", "messages": HI, "model": "other"},
        {"type": "watch", "id": "d"},
        {"type": "cancel", "id": "e"},
        {"type": "cancel", "id": "d"},
    ]
    received = []
    async with serving(app) as address, socket_client(address) as client:
        for frame in sent:
            client_frame(document, frame)
            while frame["type"] == "cancel" and "engine" not in [one["type"] for one in received]:
                received.append(await client.receive())
                assert (received[-1]["type"], received[-1]["id"]) != ("error", "d")
            await client.connection.send(json.dumps(frame))
        left = {"a", "b", "c", "d"} - {one["id"] for one in received if one["type"] in ("done", "error")}
        while left:
            received.append(await client.receive())
            if received[-1]["type"] in ("done", "error"):
                left.discard(received[-1]["id"])
    types = Documented(document)
    for frame in received:
        types.check(sockets_of(document).sends, frame)
    kinds = {frame["type"] for frame in received}
    mapping = document["components"]["schemas"][sockets_of(document).sends]["discriminator"]["mapping"]
    assert kinds == set(mapping)
    assert {frame["object"] for frame in received if frame["type"] == "chunk"} == {
        "text_completion",
        "chat.completion.chunk",
    }
    for kind in kinds:
        example = next(frame for frame in received if frame["type"] == kind)
        for other in wrong(example):
            with pytest.raises(jsonschema.ValidationError):
                types.check(sockets_of(document).sends, other)


@pytest.mark.parametrize(
    "frame",
    [
        {"type": "completion", "prompt": "hi"},
        {"type": "completion", "id": "a"},
        {"type": "completion", "id": "", "prompt": "hi"},
        {"type": "chat", "id": "a", "messages": HI, "stream": False},
        {"type": "chat", "id": "a", "messages": [{"role": "nobody", "content": "hi"}]},
        {"type": "cancel"},
        {"type": "watch", "id": 5},
        {"type": "auth"},
        {"type": "other", "id": "a"},
    ],
    ids=str,
)
async def test_frames_that_the_document_refuses_are_refused(frame):
    app = create_app(cast(Any, ScriptedEngine()), ServeConfig())
    with pytest.raises(jsonschema.ValidationError):
        client_frame(await document_of(app), frame)
    if frame["type"] == "auth":
        return  # without keys there is nothing to compare it with
    async with serving(app) as address, socket_client(address) as client:
        await client.connection.send(json.dumps(frame))
        assert (await client.receive())["type"] == "error"
