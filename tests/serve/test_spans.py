"""Spans of requests: which there are, what they hold, and how they continue a client's trace."""

import asyncio
import itertools
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import pytest
from caller import Caller
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from listening_app import client as socket_client
from listening_app import serving
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id
from scripted_engine import ScriptedEngine, Step, say
from test_log import records

from enginecore.errors import RequestAbortedError
from enginecore.outputs import RequestMetrics
from octavo_serve.app import create_app
from octavo_serve.config import ServeConfig
from octavo_serve.records import Answered, RequestRecord, Times
from octavo_serve.span_export import Traces
from octavo_serve.spans import OPERATIONS, phases

pytestmark = pytest.mark.anyio

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HI = [{"role": "user", "content": "hi"}]
COMPLETION = {"prompt": "hi"}
CHAT = {"messages": HI}

VLLM_NAMES = {
    "gen_ai.request.id",
    "gen_ai.request.n",
    "gen_ai.latency.time_in_queue",
    "gen_ai.latency.time_to_first_token",
    "gen_ai.latency.e2e",
    "gen_ai.latency.time_in_model_prefill",
    "gen_ai.latency.time_in_model_decode",
    "gen_ai.latency.time_in_model_inference",
}
"""Of vllm.tracing.SpanAttributes, those that the conventions have not."""


class Traced:
    """A server that hands its spans to a list."""

    def __init__(self, engine: ScriptedEngine, **options: Any) -> None:
        self.engine = engine
        self.exporter = InMemorySpanExporter()
        self._traces = Traces(self.exporter)
        serve = ServeConfig(served_model_name=("tiny", "alias"), **options)
        self.app = create_app(cast(Any, engine), serve, traces=self._traces)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://server")

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.client.post(path, json=body, headers=headers)

    async def spans(self) -> list[ReadableSpan]:
        """Close the traces, and return all spans in the order of their ends."""
        await self._traces.close(10, asyncio.Event())
        return list(self.exporter.get_finished_spans())

    async def requests(self) -> list[ReadableSpan]:
        return [span for span in await self.spans() if span.kind is SpanKind.SERVER]

    async def only(self) -> ReadableSpan:
        [span] = await self.requests()
        return span


@pytest.fixture
def server(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> Traced:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    return Traced(engine)


def held(span: ReadableSpan) -> dict[str, Any]:
    found = dict(span.attributes or {})
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


async def test_all_that_a_span_holds(server, engine, caplog):
    caplog.set_level(logging.INFO, "octavo_serve")
    engine.cached = 3
    engine.script = lambda prompt, params: say("abcd", "length")
    course = RequestMetrics(1000.0, 1000.75, 1002.25, time_in_queue=0.5)
    engine.course = lambda: course
    body = {
        "messages": HI,
        "model": "alias",
        "max_tokens": 4,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "seed": 0,
        "n": 2,
        "presence_penalty": 0.125,
    }
    answer = await server.post("/v1/chat/completions", body, **{"x-request-id": "mine"})
    assert answer.status_code == 200
    span = await server.only()
    assert (span.name, span.kind, span.parent) == ("chat alias", SpanKind.SERVER, None)
    assert span.status.status_code is StatusCode.UNSET
    prompt_tokens = answer.json()["usage"]["prompt_tokens"]
    assert held(span) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": "alias",
        "gen_ai.request.id": "chatcmpl-mine",
        "gen_ai.request.n": 2,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 0,
        "gen_ai.request.presence_penalty": 0.125,
        "gen_ai.response.id": "chatcmpl-mine",
        "gen_ai.response.model": "alias",
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.prompt_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.completion_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_to_first_token": 0.75,
        "gen_ai.latency.time_in_model_prefill": 0.25,
        "gen_ai.latency.time_in_model_decode": 1.5,
        "gen_ai.latency.time_in_model_inference": 1.75,
        "gen_ai.latency.e2e": 2.25,
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
    }
    [line] = records(caplog)
    assert span.context is not None
    assert (line["id"], line["ttft"]) == ("chatcmpl-mine", 0.75)
    assert line["trace_id"] == format_trace_id(span.context.trace_id)


async def test_names_are_those_of_the_conventions_or_of_vllm(server, engine):
    engine.course = lambda: RequestMetrics(1000.0, 1000.75, 1002.25, time_in_queue=0.5)
    sampling = {"top_k": 7, "seed": 1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "n": 2}
    await server.post("/v1/completions", {**COMPLETION, **sampling, "stream": True})
    await server.post("/v1/completions", {"prompt": 7})
    modules = (gen_ai_attributes, error_attributes, http_attributes)
    known = {value for module in modules for name, value in vars(module).items() if name.isupper()}
    used = {name for span in await server.spans() for name in held(span)}
    assert used >= VLLM_NAMES
    assert used - VLLM_NAMES <= known
    values = {member.value for member in gen_ai_attributes.GenAiOperationNameValues}
    assert {"chat", "text_completion", "embeddings"} <= values & set(OPERATIONS.values())


def test_phases_follow_one_another():
    whole = Times(10.0, 11.0, 13.0, 17.0)
    assert phases(whole, 20.0) == [("queue", 10.0, 11.0), ("prefill", 11.0, 13.0), ("decode", 13.0, 17.0)]
    one_token = Times(10.0, 11.0, 13.0, 12.999)
    assert phases(one_token, 20.0) == [("queue", 10.0, 11.0), ("prefill", 11.0, 13.0)]
    left = [Times(10.0, None, None, None), Times(10.0, 11.0, None, None), Times(10.0, 11.0, 13.0, None)]
    assert phases(left[0], 20.0) == [("queue", 10.0, 20.0)]
    assert phases(left[1], 20.0) == [("queue", 10.0, 11.0), ("prefill", 11.0, 20.0)]
    assert phases(left[2], 20.0)[-1] == ("decode", 13.0, 20.0)


async def test_phases_are_children_inside_the_request_s_span(server, engine):
    engine.allowed = 0
    courses: list[RequestMetrics] = []

    def course() -> RequestMetrics:
        courses.append(RequestMetrics(time.time()))
        return courses[-1]

    engine.course = course
    request = asyncio.create_task(server.post("/v1/completions", COMPLETION))
    while not courses:
        await asyncio.sleep(0.001)
    [mine] = courses
    mine.time_in_queue, mine.first_token_time = 0.002, mine.arrival_time + 0.004
    mine.finished_time = mine.arrival_time + 0.008
    while time.time() < mine.finished_time:
        await asyncio.sleep(0.001)
    engine.allow(10)
    await request
    *children, parent = sorted(await server.spans(), key=lambda span: span.kind is SpanKind.SERVER)
    assert parent.context is not None
    assert [span.name for span in children] == ["queue", "prefill", "decode"]
    for span in children:
        assert span.parent is not None and span.context is not None
        assert span.parent.span_id == parent.context.span_id
        assert span.context.trace_id == parent.context.trace_id
        assert span.kind is SpanKind.INTERNAL
    starts = [mine.arrival_time + after for after in (0, 0.002, 0.004, 0.008)]
    edges = [int(at * 1e9) for at in starts]
    assert [(span.start_time, span.end_time) for span in children] == list(itertools.pairwise(edges))
    assert parent.start_time is not None and parent.end_time is not None
    assert parent.start_time <= edges[0] < edges[-1] <= parent.end_time


async def test_of_several_prompts_the_span_has_the_whole(server, engine):
    times = iter([RequestMetrics(100.0, 105.0, 109.0, 3.0), RequestMetrics(100.5, 103.0, 107.0, 1.0)])
    engine.course = lambda: next(times)
    await server.post("/v1/completions", {"prompt": ["a", "b"], "n": 2})
    attributes = held(await server.only())
    assert attributes["gen_ai.latency.time_in_queue"] == 1.5
    assert attributes["gen_ai.latency.time_to_first_token"] == 3.0
    assert attributes["gen_ai.latency.e2e"] == 9.0
    assert attributes["gen_ai.response.finish_reasons"] == ["stop"] * 4


RESPONSES = {"input": "hi"}
MESSAGES = {"messages": HI, "max_tokens": 5}
ROUTES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", COMPLETION, "text_completion tiny"),
    ("/v1/chat/completions", CHAT, "chat tiny"),
    ("/v1/responses", RESPONSES, "chat tiny"),
    ("/v1/messages", {"model": "tiny", **MESSAGES}, "chat tiny"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "name"), ROUTES)
async def test_every_route_that_generates(server, engine, path, body, name, stream):
    engine.script = lambda prompt, params: say("abc")
    answer = await server.post(path, {**body, "stream": stream})
    assert answer.status_code == 200
    span = await server.only()
    attributes = held(span)
    assert (span.name, attributes["http.route"]) == (name, path)
    assert attributes["gen_ai.usage.output_tokens"] == 4
    assert attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert attributes.get("gen_ai.request.stream", False) is stream
    assert "error.type" not in attributes
    assert attributes["gen_ai.response.id"] in answer.text


def test_no_route_that_generates_is_left_out(engine):
    app = create_app(cast(Any, engine), ServeConfig(admin_routes=True))
    posts = {route.path for route in app.routes if "POST" in (getattr(route, "methods", None) or ())}
    others = {
        "/tokenize",
        "/detokenize",
        "/v1/messages/count_tokens",
        "/expert_placement/reload",
        "/reset_prefix_cache",
    }
    assert {path for method, path in OPERATIONS if method == "POST"} == posts - others


async def test_a_beam_search(server, engine):
    times = iter(RequestMetrics(100.0 + round, 100.5 + round, 100.75 + round, 0.25) for round in range(9))
    engine.course = lambda: next(times)
    engine.script = lambda prompt, params: [Step("a", finish_reason="length")]
    body = {**COMPLETION, "use_beam_search": True, "n": 1, "max_tokens": 2}
    assert (await server.post("/v1/completions", body)).status_code == 200
    attributes = held(await server.only())
    assert attributes["gen_ai.latency.time_to_first_token"] == 0.5
    assert attributes["gen_ai.latency.e2e"] >= 1.75


async def test_other_routes_have_none(server):
    for path in ("/health", "/metrics", "/v1/models", "/load", "/version", "/"):
        await server.client.get(path)
    await server.client.get("/v1/completions")
    await server.post("/tokenize", COMPLETION)
    await server.post("/nothing", {})
    assert await server.spans() == []


async def test_a_span_continues_the_client_s_trace(server):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=x,other=y"}
    await server.post("/v1/completions", COMPLETION, **headers)
    span = await server.only()
    assert span.context is not None and span.parent is not None
    assert format_trace_id(span.context.trace_id) == TRACE
    assert format_span_id(span.parent.span_id) == PARENT
    assert span.context.trace_state.to_header() == "vendor=x,other=y"


async def test_a_trace_that_is_not_sampled_has_no_span_here(server, caplog):
    caplog.set_level(logging.INFO, "octavo_serve")
    await server.post("/v1/completions", COMPLETION, traceparent=f"00-{TRACE}-{PARENT}-00")
    assert await server.spans() == []
    [line] = records(caplog)
    assert line["trace_id"] == TRACE


@pytest.mark.parametrize("sampler", ["always_off", "parentbased_always_off"])
async def test_samplers_of_the_environment(engine, monkeypatch, sampler):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    server = Traced(engine)
    await server.post("/v1/completions", COMPLETION)
    await server.post("/v1/completions", COMPLETION, traceparent=f"00-{TRACE}-{PARENT}-01")
    assert len(await server.requests()) == (sampler == "parentbased_always_off")


async def test_the_sdk_switched_off_by_the_environment(engine, monkeypatch):
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    server = Traced(engine)
    assert (await server.post("/v1/completions", COMPLETION)).status_code == 200
    assert await server.spans() == []


@pytest.mark.parametrize(
    "given",
    ["", "00", f"00-{TRACE}-{PARENT}", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01", "x" * 5000],
)
async def test_a_wrong_traceparent_begins_a_new_trace(server, given):
    answer = await server.post("/v1/completions", COMPLETION, traceparent=given)
    assert answer.status_code == 200
    span = await server.only()
    assert span.parent is None


HEADER = st.tuples(
    st.sampled_from([b"traceparent", b"tracestate", b"baggage", b"other"]),
    st.one_of(
        st.binary(max_size=200),
        st.text(max_size=80).map(str.encode),
        st.sampled_from([f"00-{TRACE}-{PARENT}-01".encode(), b"a=1,b=2,a=3", b"=" * 40, b"a=" * 600]),
    ),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(HEADER, max_size=6))
def test_no_headers_are_too_strange(traces_of_any_headers, headers):
    traces, answered = traces_of_any_headers
    trace = traces.add(headers, "chat", answered)
    assert trace is not None
    assert len(trace) == 32
    parents = [value for name, value in headers if name == b"traceparent"]
    if parents != [f"00-{TRACE}-{PARENT}-01".encode()]:
        # What hypothesis makes up is no traceparent.
        assert trace != TRACE


@pytest.fixture
def traces_of_any_headers():
    path = "/v1/chat/completions"
    return Traces(InMemorySpanExporter()), Answered("POST", path, path, 400, None, RequestRecord(), 0.5)


async def ended(server: Traced) -> tuple[str | None, bool, Any]:
    span = await server.only()
    attributes = held(span)
    is_error = span.status.status_code is StatusCode.ERROR
    assert span.events == ()
    assert span.status.description is None
    return attributes.get("error.type"), is_error, attributes.get("http.response.status_code")


async def test_a_client_s_fault(server):
    await server.post("/v1/completions", {"prompt": "hi", "temperature": -1})
    assert await ended(server) == ("400", False, 400)


async def test_a_model_that_is_not_served_is_not_named(server):
    await server.post("/v1/completions", {"prompt": "hi", "model": "private-name"})
    span = await server.only()
    assert span.name == "text_completion"
    assert "private-name" not in span.to_json()
    assert held(span)["error.type"] == "404"


async def test_a_missing_key(engine):
    server = Traced(engine, api_key=("secret",))
    await server.post("/v1/completions", COMPLETION)
    assert await ended(server) == ("401", False, 401)


async def test_a_dead_engine(server, engine):
    engine.die("killed by signal 9")
    await server.post("/v1/completions", COMPLETION)
    assert await ended(server) == ("503", True, 503)


async def test_a_stream_that_fails_on_its_way(server, engine):
    engine.allowed = 1
    request = asyncio.create_task(server.post("/v1/completions", {**COMPLETION, "stream": True}))
    while engine.given < 1:
        await asyncio.sleep(0.001)
    # Until the first event has gone out.
    for _ in range(20):
        await asyncio.sleep(0)
    engine.die("killed by signal 9")
    assert "killed" in (await request).text
    assert await ended(server) == ("503", True, 200)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_who_leaves_the_queue(server, engine, stream):
    engine.allowed = 0
    caller = Caller(server.app, {"prompt": "hi", "stream": stream})
    while not engine.streams:
        await asyncio.sleep(0)
    caller.leave()
    await caller.task
    [queue, request] = await server.spans()
    assert queue.name == "queue"
    assert request.status.status_code is StatusCode.UNSET
    assert held(request)["error.type"] == "client_disconnected"
    assert held(request)["http.response.status_code"] == 499
    assert "gen_ai.latency.e2e" not in held(request)


async def test_a_client_who_leaves_a_stream(server, engine):
    engine.allowed = 1
    engine.script = lambda prompt, params: say("abc")
    caller = Caller(server.app, {"prompt": "hi", "stream": True})
    await caller.received(2)
    caller.leave()
    await caller.task
    assert await ended(server) == ("client_disconnected", False, 200)


async def test_a_stream_that_the_server_interrupts(server, engine):
    engine.allowed = 1
    engine.script = lambda prompt, params: say("abc")
    caller = Caller(server.app, {"prompt": "hi", "stream": True})
    await caller.received(2)
    engine.interrupt(engine.streams[0], RequestAbortedError("the server is shutting down"))
    await caller.task
    assert await ended(server) == ("aborted", False, 200)


MARK = "wombat"
KEY = "a-key-to-keep"


async def test_neither_prompts_nor_answers_nor_keys(engine):
    server = Traced(engine, api_key=(KEY,))
    engine.script = lambda prompt, params: say(MARK)
    headers = {"authorization": f"Bearer {KEY}", "baggage": f"user={MARK}", "cookie": MARK}
    text = f"the {MARK}"
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": text, "stop": MARK[:2], "user": MARK, "cache_salt": MARK}),
        ("/v1/completions", {"prompt": text, "stream": True, "logit_bias": {MARK: 1}}),
        ("/v1/completions", {"prompt": MARK * 20}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "system", "content": text}], "metadata": {"a": MARK}},
        ),
        ("/v1/chat/completions", {"messages": [{"role": MARK, "content": text}], "stream": True}),
        ("/v1/responses", {"input": text, "instructions": text}),
        ("/v1/messages", {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 9}),
        ("/v1/messages", {"model": MARK, "messages": MARK}),
    ]
    for path, body in bodies:
        await server.post(f"{path}?key={MARK}", body, **headers)
        await server.post(path, body, authorization=f"Bearer {MARK}")
    found = await server.requests()
    assert len(found) == 2 * len(bodies)
    written = "\n".join(span.to_json() for span in await server.spans())
    assert MARK not in written
    assert KEY not in written


def calls_per_request(run: Callable[[], object]) -> int:
    """Count the calls of functions of OpenTelemetry and of our modules for spans."""
    counted = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal counted
        name = frame.f_globals.get("__name__", "")
        counted += event == "call" and name.startswith(("opentelemetry", "octavo_serve.span"))

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counted


@pytest.mark.parametrize("stream", [False, True])
def test_no_work_for_tokens(monkeypatch, stream):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")

    def count(tokens: int) -> int:
        engine = ScriptedEngine(script=lambda prompt, params: say("a" * tokens, "length"))
        server = Traced(engine)
        body = {**COMPLETION, "stream": stream, "max_tokens": tokens}
        answers: list[httpx.Response] = []

        async def ask() -> None:
            answers.append(await server.post("/v1/completions", body))

        asyncio.run(ask())  # the first one imports what is imported late
        calls = calls_per_request(lambda: asyncio.run(ask()))
        assert all(answer.status_code == 200 for answer in answers)
        assert engine.given == 2 * (tokens if stream else 1)
        return calls

    few, many = count(2), count(40)
    assert few == many > 0


@asynccontextmanager
async def socket_of(server: Traced, **options: Any) -> AsyncIterator[Any]:
    async with serving(server.app) as address, socket_client(address, **options) as socket:
        yield socket


async def test_requests_of_a_websocket(server, engine):
    engine.script = lambda prompt, params: say("abc")
    other = TRACE[::-1]
    handshake = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    async with socket_of(server, additional_headers=handshake) as socket:
        await socket.send("completion", "a", prompt="hi")
        await socket.until_end("a")
        await socket.send("chat", "b", messages=HI, traceparent=f"00-{other}-{PARENT}-01", tracestate="v=1")
        await socket.until_end("b")
        await socket.send("chat", "c", messages=HI, traceparent=7)
        await socket.until_end("c")
        await socket.send("completion", "d", prompt="hi", temperature=-1)
        await socket.until_end("d")
        await socket.send("watch", "e")
        await socket.receive()
    first, second, third, fourth = await server.requests()
    assert first.name == "text_completion tiny"
    assert held(first) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.id": "a",
        "gen_ai.request.n": 1,
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 16,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.id": "a",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.prompt_tokens": 2,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.completion_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "http.route": "/v1/stream",
    }
    found = [span.context for span in (first, second, third, fourth)]
    assert [format_trace_id(context.trace_id) for context in found if context] == [TRACE, other, TRACE, TRACE]
    assert found[1] is not None and found[1].trace_state.to_header() == "v=1"
    assert held(fourth)["error.type"] == "400"


async def test_a_websocket_s_request_that_is_cancelled_and_one_whose_client_leaves(server, engine):
    engine.script = lambda prompt, params: say("abc")
    engine.allowed = 1
    async with socket_of(server) as socket:
        await socket.send("completion", "a", prompt="hi")
        await socket.receive()
        await socket.send("cancel", "a")
        await socket.until_end("a")
        await socket.send("completion", "b", prompt="hi")
        while len(engine.streams) < 2:
            await asyncio.sleep(0.001)
    first, second = await server.requests()
    assert held(first)["error.type"] == "aborted"
    assert held(second)["error.type"] == "client_disconnected"
