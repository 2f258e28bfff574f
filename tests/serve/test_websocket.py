"""The WebSocket /v1/stream, on a real socket over an engine that answers from a script."""

import asyncio
import json
from typing import Any, cast

import httpx
import pytest
from listening_app import Client, client, serving, text_of
from scripted_engine import ScriptedEngine, Step, say
from websockets.exceptions import ConnectionClosed, InvalidStatus

from octavo_serve.app import create_app
from octavo_serve.config import ServeConfig
from octavo_serve.routes import stream as stream_route

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(script=lambda prompt, params: say(prompt.text or "ab"))


@pytest.fixture
async def address(engine):
    async with serving(create_app(cast(Any, engine), ServeConfig(served_model_name=("tiny",)))) as found:
        yield found


@pytest.fixture
async def socket(address):
    async with client(address) as found:
        yield found


async def submitted(engine: ScriptedEngine, count: int) -> None:
    while len(engine.requests) < count:
        await asyncio.sleep(0.001)


async def idle(engine: ScriptedEngine) -> None:
    while not all(stream.ended for stream in engine.streams):
        await asyncio.sleep(0.001)


async def test_a_chat_has_the_chunks_of_http(socket, address):
    async with httpx.AsyncClient(base_url=f"http://{address}") as http:
        body = {"messages": HI, "logprobs": True, "stream": True}
        answer = await http.post("/v1/chat/completions", json=body)
    events = [json.loads(event[6:]) for event in answer.text.split("\n\n") if "[DONE]" not in event and event]
    await socket.send("chat", "a", messages=HI, logprobs=True)
    *frames, done = await socket.until_end("a")
    assert [frame.pop("type") for frame in frames] == ["chunk"] * len(events)
    for frame, event in zip(frames, events, strict=True):
        assert frame | {"id": 0, "created": 0} == event | {"id": 0, "created": 0}
    assert {frame["id"] for frame in frames} == {"a"}
    counted = {"prompt_tokens": 9, "completion_tokens": 10, "total_tokens": 19}
    assert done == {
        "type": "done",
        "id": "a",
        "usage": {**counted, "prompt_tokens_details": {"cached_tokens": 0}},
    }


async def test_many_requests_at_once(socket, engine):
    engine.allowed = 0
    prompts = {f"r{number}": f"text {number}" for number in range(50)}
    for name, prompt in prompts.items():
        await socket.send("completion", name, prompt=prompt)
    await submitted(engine, 50)
    engine.allow(10_000)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in prompts}
    ended: set[str] = set()
    while len(ended) < 50:
        frame = await socket.receive()
        found[frame["id"]].append(frame)
        if frame["type"] == "done":
            ended.add(frame["id"])
    assert {name: text_of(frames) for name, frames in found.items()} == prompts


async def test_an_id_is_free_again_after_its_end(socket, engine):
    for prompt in ("one", "two"):
        await socket.send("completion", "same", prompt=prompt)
        assert text_of(await socket.until_end("same")) == prompt


async def test_usage_comes_as_a_chunk_where_the_body_asks_for_it(socket):
    await socket.send("completion", "a", prompt="xy", stream_options={"include_usage": True})
    *_, last, done = await socket.until_end("a")
    assert (last["choices"], last["usage"]) == ([], done["usage"])


async def test_a_cancelled_request_ends_and_others_go_on(socket, engine):
    engine.allowed = 1
    await socket.send("completion", "gone", prompt="abcdef")
    assert (await socket.receive())["choices"][0]["text"] == "a"
    await socket.send("completion", "stays", prompt="abcdef")
    await submitted(engine, 2)
    await socket.send("cancel", "gone")
    abort, done = await socket.until_end("gone")
    assert abort["choices"][0]["finish_reason"] == "abort"
    assert (done["type"], done["usage"]["completion_tokens"]) == ("done", 1)
    assert engine.aborted == [engine.requests[0].request_id]
    engine.allow(100)
    assert text_of(await socket.until_end("stays")) == "abcdef"


async def test_a_queued_request_is_cancelled_before_its_first_token(socket, engine):
    engine.allowed = 0
    await socket.send("completion", "a", prompt="ab", n=2, temperature=1)
    await socket.send("cancel", "a")
    *aborts, done = await socket.until_end("a")
    assert [choice["finish_reason"] for frame in aborts for choice in frame["choices"]] == ["abort"] * 2
    assert done["usage"]["completion_tokens"] == 0
    await idle(engine)


BAD = [
    ("{", "not valid JSON"),
    ("[1]", "object"),
    ("\x00", "not valid JSON"),
    ('{"a":' * 100_000, "nested"),
    (b'{"type": "completion"}', "binary"),
    ('{"id": "x"}', "got None"),
    ('{"type": "hello"}', "got 'hello'"),
    ('{"type": ["chat"]}', "type must be"),
    ('{"type": "completion", "prompt": "hi"}', "id must be"),
    ('{"type": "completion", "id": 5, "prompt": "hi"}', "id must be"),
    ('{"type": "completion", "id": "", "prompt": "hi"}', "id must be"),
    (json.dumps({"type": "completion", "id": "i" * 300, "prompt": "hi"}), "id must be"),
    ('{"type": "completion", "id": "runs", "prompt": "hi"}', "has not ended"),
    ('{"type": "completion", "id": "runs", "stream": false}', "has not ended"),
    ('{"type": "nothing", "id": "runs"}', "got 'nothing'"),
    ('{"type": "cancel"}', "no request"),
    ('{"type": "cancel", "id": 5}', "no request"),
]


async def test_bad_frames_hurt_nothing_else(socket, engine):
    engine.allowed = 0
    await socket.send("completion", "runs", prompt="abc")
    await submitted(engine, 1)
    for frame, said in BAD:
        await socket.connection.send(frame)
        error = await socket.receive()
        assert error["type"] == "error"
        assert error["id"] in (None, "x"), frame
        assert said in error["error"]["message"], error
        assert error["error"]["type"] == "invalid_request_error"
    engine.allow(100)
    assert text_of(await socket.until_end("runs")) == "abc"
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    "type, fields, param",
    [
        ("completion", {}, "prompt"),
        ("completion", {"prompt": "hi", "temperature": "hot"}, "temperature"),
        ("completion", {"prompt": "hi", "max_tokens": 0}, "max_tokens"),
        ("completion", {"prompt": "hi", "model": "other"}, "model"),
        ("completion", {"prompt": "hi", "stream": False}, "stream"),
        ("completion", {"prompt": "hi", "use_beam_search": True, "n": 2}, "stream"),
        ("chat", {"messages": []}, "messages"),
        ("cancel", {}, "id"),
    ],
)
async def test_a_request_that_is_refused_ends_with_an_error(socket, type, fields, param):
    await socket.send(type, "a", **fields)
    [error] = await socket.until_end("a")
    assert (error["type"], error["error"]["param"]) == ("error", param)
    await socket.send("completion", "b", prompt="hi")
    assert text_of(await socket.until_end("b")) == "hi"


async def test_a_frame_beyond_the_limit(socket, engine, monkeypatch):
    monkeypatch.setattr(stream_route, "MOST_FRAME_BYTES", 1000)
    await socket.send("completion", "a", prompt="x" * 2000)
    assert "larger than 1000 bytes" in (await socket.error())["message"]
    assert engine.requests == []
    await socket.send("completion", "a", prompt="hi")
    assert text_of(await socket.until_end("a")) == "hi"


async def test_a_frame_may_be_no_larger_than_a_body(engine):
    app = create_app(cast(Any, engine), ServeConfig(max_body_bytes=500))
    async with serving(app) as address, client(address) as socket:
        await socket.send("completion", "a", prompt="x" * 600)
        assert "larger than 500 bytes" in (await socket.error())["message"]
        await works(socket)


async def test_a_frame_far_beyond_the_limit_ends_its_own_socket_only(address, engine):
    async with client(address) as other, client(address) as large:
        with pytest.raises(ConnectionClosed) as closed:
            await large.send("completion", "a", prompt="x" * (2 * stream_route.MOST_FRAME_BYTES + 1))
            await large.receive()
        assert closed.value.rcvd is None or closed.value.rcvd.code == 1009
        await other.send("completion", "a", prompt="hi")
        assert text_of(await other.until_end("a")) == "hi"


async def test_more_requests_than_a_socket_may_have(socket, engine, monkeypatch):
    monkeypatch.setattr(stream_route, "MOST_REQUESTS", 2)
    engine.allowed = 0
    for name in "abc":
        await socket.send("completion", name, prompt="hi")
    frame = await socket.receive()
    assert (frame["id"], frame["type"]) == ("c", "error")
    assert "2 requests at once" in frame["error"]["message"]
    engine.allow(100)
    assert text_of(await socket.until_end("a")) == "hi"


async def test_leaving_aborts_what_has_not_finished(address, engine):
    engine.allowed = 0
    async with client(address) as socket:
        for number in range(10):
            await socket.send("completion", str(number), prompt="abc")
        await submitted(engine, 10)
        engine.allow(3)
        await socket.receive()
    await idle(engine)
    assert sorted(engine.aborted) == sorted(request.request_id for request in engine.requests)


async def test_a_connection_that_breaks_aborts_too(address, engine):
    engine.allowed = 0
    async with client(address) as socket:
        await socket.send("completion", "a", prompt="abc")
        await submitted(engine, 1)
        socket.connection.transport.abort()
        await idle(engine)
    assert len(engine.aborted) == 1


async def test_requests_of_a_connection_that_breaks_are_no_failures(engine, caplog):
    """The send of one finds out, and those of the others come after it."""
    app = create_app(cast(Any, engine), ServeConfig(served_model_name=("tiny",)))
    engine.allowed = 0
    unread = [{"type": "websocket.connect"}]
    unread += [
        {"type": "websocket.receive", "text": json.dumps({"type": "completion", "id": name, "prompt": "ab"})}
        for name in "abc"
    ]
    left = asyncio.Event()

    async def receive():
        if unread:
            return unread.pop(0)
        await left.wait()
        return {"type": "websocket.disconnect", "code": 1006}

    async def send(message):
        if message["type"] == "websocket.send":
            raise OSError("broken pipe")

    scope = {
        "type": "websocket",
        "path": "/v1/stream",
        "raw_path": b"/v1/stream",
        "root_path": "",
        "scheme": "ws",
        "query_string": b"",
        "headers": [],
        "client": ("client", 1),
        "server": ("server", 80),
        "subprotocols": [],
    }
    task = asyncio.create_task(app(scope, receive, send))
    await submitted(engine, 3)
    engine.allow(3)
    await idle(engine)
    left.set()
    await task
    assert "failed" not in caplog.text


async def test_an_engine_that_dies_is_told_of(socket, engine):
    engine.allowed = 0
    await socket.send("completion", "a", prompt="abc")
    await submitted(engine, 1)
    engine.die("killed")
    [error] = await socket.until_end("a")
    assert error["error"]["message"] == "killed"
    assert error["error"]["type"] == "server_error"
    await socket.send("completion", "b", prompt="abc")
    [refused] = await socket.until_end("b")
    assert refused["error"]["message"] == "killed"


async def test_each_request_is_counted(socket, engine):
    await socket.send("completion", "a", prompt="abc")
    await socket.until_end("a")
    await socket.send("completion", "b", prompt="")
    await socket.until_end("b")
    counted = engine.metrics.text().decode()
    for status in (200, 400):
        line = f'http_requests_total{{handler="/v1/stream",method="WS",status="{status}"}} 1.0'
        assert line in counted


# Keys and origins


@pytest.fixture
async def guarded(engine):
    options = ServeConfig(api_key=("other", "secret"), cors_origins=("https://friend.example",))
    async with serving(create_app(cast(Any, engine), options)) as found:
        yield found


async def works(socket: Client) -> None:
    await socket.send("completion", "a", prompt="hi")
    assert text_of(await socket.until_end("a")) == "hi"


async def test_the_key_in_the_header(guarded):
    async with client(guarded, additional_headers={"Authorization": "Bearer secret"}) as socket:
        await works(socket)


@pytest.mark.parametrize("header", ["Bearer wrong", "Basic secret", "secret", ""])
async def test_a_wrong_header_ends_the_socket(guarded, header, caplog):
    async with client(guarded, additional_headers={"Authorization": header}) as socket:
        assert (await socket.error())["code"] == "invalid_api_key"
        with pytest.raises(ConnectionClosed) as closed:
            await socket.receive()
        assert closed.value.rcvd.code == 1008
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_the_key_in_the_first_frame(guarded):
    async with client(guarded) as socket:
        await socket.send("auth", key="secret")
        await works(socket)
        await socket.send("auth", key="secret")
        await socket.send("auth", key="wrong")
        assert (await socket.error())["code"] == "invalid_api_key"
        await works(socket)


NO_KEY = [
    '{"type":"auth","key":"wrong"}',
    '{"type":"auth"}',
    '{"type":"auth","key":5}',
    '{"type":"chat","id":"a"}',
    '{"type":"completion","id":"a","prompt":"hi","key":"secret"}',
    "{",
]


@pytest.mark.parametrize("frame", NO_KEY)
async def test_a_first_frame_without_the_key_ends_the_socket(guarded, engine, frame):
    async with client(guarded) as socket:
        await socket.connection.send(frame)
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                last = await socket.error()
        assert last["code"] == "invalid_api_key"
        assert closed.value.rcvd.code == 1008
    assert engine.requests == []


async def test_a_server_without_a_key_takes_any(socket):
    await socket.send("auth", key="any")
    await works(socket)


@pytest.mark.parametrize("origin", [None, "https://friend.example"])
async def test_pages_of_allowed_origins_may_connect(guarded, origin):
    async with client(guarded, origin=origin or f"http://{guarded}") as socket:
        await socket.send("auth", key="secret")
        await works(socket)


@pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1:1", "null", "http://[", ""])
async def test_pages_of_other_origins_may_not_connect(guarded, origin, caplog):
    with pytest.raises(InvalidStatus) as refused:
        async with client(guarded, origin=origin, additional_headers={"Authorization": "Bearer secret"}):
            pass
    assert refused.value.response.status_code == 403
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_what_waits_for_a_slow_reader_is_bounded(address, engine):
    """It reads nothing until the engine is held up by that, and then gets everything."""
    pieces = [Step(f"{number:05}" * 20_000, [1]) for number in range(60)]
    pieces[-1].finish_reason = "length"
    engine.script = lambda prompt, params: list(pieces)
    async with client(address, max_queue=1) as socket:
        for name in ("a", "b"):
            await socket.send("completion", name, prompt="hi", max_tokens=60)
        before = -1
        while before != engine.given:
            before = engine.given
            await asyncio.sleep(0.2)
        # Without a bound all 120 outputs would be on the way.
        assert 0 < engine.given < 2 * len(pieces)
        found = {"a": "", "b": ""}
        ended = 0
        while ended < 2:
            frame = await socket.receive()
            if frame["type"] == "chunk":
                found[frame["id"]] += frame["choices"][0]["text"]
            ended += frame["type"] == "done"
    expected = "".join(piece.text for piece in pieces)
    assert [text == expected for text in found.values()] == [True, True]
