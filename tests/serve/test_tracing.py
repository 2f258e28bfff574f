"""Spans on their way from a server's process to a collector, and what the server does without one."""

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from test_log import requests as request_lines
from test_process import server

from enginecore.errors import ConfigError
from octavo_serve.config import ServeConfig
from octavo_serve.records import Answered, RequestRecord
from octavo_serve.span_export import LoggedExporter, Traces
from octavo_serve.tracing import check, open_traces, with_path
from span_collector import Collector, collecting

CLIENT = f"00-{'4' * 32}-{'5' * 16}-01"
ROUTE = "/v1/completions"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


def lines_about_spans(lines: list[str]) -> list[str]:
    return [line for line in lines if "span" in line.lower() or "opentelemetry" in line]


def ask(served, count: int = 1, **headers: str) -> None:
    for _ in range(count):
        served.tell("allow 1")
        answer = served.client.post(ROUTE, json={"prompt": "hi"}, headers=headers)
        assert answer.status_code == 200


def test_spans_reach_a_collector(collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=blue,authorization=Bearer%20abc")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.version=mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")  # so that all are those of the end
    with server("--otlp-traces-endpoint", collector.url, "--served-model-name", "tiny") as served:
        served.load()
        ask(served, 3, traceparent=CLIENT)
        served.client.get("/health")
        served.process.send_signal(signal.SIGTERM)
        assert served.finish() == 0
    assert lines_about_spans(served.lines) == []
    [post] = collector.posts
    assert post.path == "/v1/traces"
    assert (post.headers["x-tenant"], post.headers["authorization"]) == ("blue", "Bearer abc")
    assert (post.headers["content-type"], post.headers["content-encoding"]) == (
        "application/x-protobuf",
        "gzip",
    )
    requests = collector.requests
    assert [found.span.name for found in requests] == ["text_completion tiny"] * 3
    assert {found.span.trace_id.hex() for found in requests} == {"4" * 32}
    assert {found.span.parent_span_id.hex() for found in requests} == {"5" * 16}
    for found in requests:
        assert found.attributes["gen_ai.usage.output_tokens"] == 4
        assert list(collector.phases(found)) == ["queue"]
        assert found.resource["service.name"] == "octavo-serve"
        assert found.resource["service.version"] == "mine"
        assert found.resource["deployment.environment.name"] == "test"
        assert found.resource["service.instance.id"]
    assert all("trace_id=" + "4" * 32 in line for line in request_lines(served))


def test_the_service_s_name_and_an_endpoint_of_the_environment(collector, monkeypatch):
    monkeypatch.setenv("OCTAVO_OTLP_TRACES_ENDPOINT", f"{collector.url}/other/path?tenant=1")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-backend")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with server() as served:
        served.load()
        ask(served)
        collector.wait_for_posts(1)  # while the server runs
        served.process.send_signal(signal.SIGTERM)
        assert served.finish() == 0
    assert {post.path for post in collector.posts} == {"/other/path?tenant=1"}
    assert {found.resource["service.name"] for found in collector.requests} == {"chat-backend"}


OURS = ("opentelemetry", "octavo_serve.span_export", "google.protobuf", "requests")
"""What an exporter of spans brings."""


def modules_of(served) -> list[str]:
    served.tell("modules")
    return json.loads(served.wait_for(r"modules (\[.*\])")[1])


def test_nothing_of_opentelemetry_is_imported_unless_it_is_asked_for(collector, monkeypatch):
    # The SDK's own variable alone asks for nothing.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.url)
    with server() as served:
        served.load()
        ask(served)
        imported = {name for name in modules_of(served) if name.startswith(OURS)}
        served.process.send_signal(signal.SIGTERM)
        assert served.finish() == 0
    # FastAPI imports the API, but not the SDK, since 0.165.
    code = "import fastapi, sys; print(*sys.modules)"
    fastapi = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert imported - set(fastapi.stdout.split()) == set()
    assert not any(name.startswith(("opentelemetry.sdk", "opentelemetry.exporter")) for name in imported)
    assert collector.posts == []


def test_a_collector_that_refuses_is_logged_once_and_hurts_nobody(collector, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "5")
    collector.status = 400
    with server("--otlp-traces-endpoint", f"{collector.url}/v1/traces?key=secret") as served:
        served.load()
        for number in range(1, 5):
            ask(served)
            collector.wait_for_posts(number)
        lost = len(collector.spans)
        collector.status = 200
        ask(served)
        collector.wait_for_posts(5)
        served.process.send_signal(signal.SIGTERM)
        assert served.finish() == 0
    failed, again = lines_about_spans(served.lines)
    assert f"spans cannot be exported to {collector.url}/v1/traces: " in failed
    assert "400" in failed
    assert f"spans are exported to {collector.url}/v1/traces again, {lost} were lost" in again
    assert "secret" not in "\n".join(served.lines)
    assert any(line.endswith(f"tracing requests to {collector.url}/v1/traces") for line in served.lines)


def test_no_collector_at_all(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "5")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "2")  # for one retry
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        port = nobody.getsockname()[1]
        with server("--otlp-traces-endpoint", f"http://127.0.0.1:{port}") as served:
            served.load()
            ask(served, 20)
            served.wait_for("spans cannot be exported")
            ask(served, 20)
            served.process.send_signal(signal.SIGTERM)
            assert served.process.stderr is not None
            served.lines += [line.rstrip("\n") for line in served.process.stderr]
            assert served.finish() == 0
    assert len(request_lines(served)) == 40
    lines = lines_about_spans(served.lines)
    assert len([line for line in lines if "cannot be exported" in line]) == 1
    assert len([line for line in lines if "Queue full" in line]) <= 1
    assert len(lines) <= 3  # the last spans may be too late
    assert "refused" in "\n".join(lines)


@pytest.mark.slow
def test_a_collector_that_does_not_answer_holds_up_no_end(collector):
    collector.answers.clear()
    with server("--otlp-traces-endpoint", collector.url, "--shutdown-timeout", "0") as served:
        served.load()
        ask(served)
        served.process.send_signal(signal.SIGTERM)
        collector.wait_for_posts(1)
        assert served.finish() == 0
    assert "the last spans could not be exported in time" in served.lines[-1]


class _Waiting(SpanExporter):
    """Exports once it is allowed to."""

    def __init__(self) -> None:
        self.allowed = threading.Event()
        self.begun = threading.Event()
        self.exported = 0

    def export(self, spans) -> SpanExportResult:
        self.begun.set()
        self.allowed.wait()
        self.exported += len(spans)
        return SpanExportResult.SUCCESS


@pytest.mark.anyio
async def test_closing_waits_for_the_last_export():
    exporter = _Waiting()
    traces = Traces(exporter)
    traces.add([], "chat", answered())
    closing = asyncio.create_task(traces.close(60, asyncio.Event()))
    while not exporter.begun.is_set():
        await asyncio.sleep(0.001)
    assert not closing.done()
    exporter.allowed.set()
    await closing
    assert exporter.exported == 1


def answered() -> Answered:
    return Answered("POST", ROUTE, ROUTE, 200, None, RequestRecord(), 0.5)


class _Failing(SpanExporter):
    """Fails as it is told to."""

    def __init__(self) -> None:
        self.results: list[SpanExportResult | OSError] = []

    def export(self, spans) -> SpanExportResult:
        result = self.results.pop(0)
        if isinstance(result, OSError):
            raise result
        if result is SpanExportResult.FAILURE:
            log = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
            log.warning("Transient error %s", "refused at /v1/traces?key=a-secret")
            log.error("Failed to export")
        return result


def test_each_outage_is_logged_once_with_its_first_reason(caplog):
    caplog.set_level(logging.INFO)
    provider = TracerProvider()
    batch = [provider.get_tracer("test").start_span(str(number)) for number in range(3)]
    inner = _Failing()
    exporter = LoggedExporter(inner, "http://user:word@host:4318/v1/traces?key=a-secret")
    good, bad = SpanExportResult.SUCCESS, SpanExportResult.FAILURE
    inner.results = [good, bad, bad, bad, good, good, bad, good, OSError("down at ?key=a-secret"), bad]
    found = [exporter.export(batch) for _ in range(len(inner.results))]
    assert found == [good, bad, bad, bad, good, good, bad, good, bad, bad]
    assert [record.getMessage() for record in caplog.records] == [
        "spans cannot be exported to http://host:4318/v1/traces: Transient error refused at /v1/traces?…",
        "spans are exported to http://host:4318/v1/traces again, 9 were lost",
        "spans cannot be exported to http://host:4318/v1/traces: Transient error refused at /v1/traces?…",
        "spans are exported to http://host:4318/v1/traces again, 3 were lost",
        "spans cannot be exported to http://host:4318/v1/traces: down at ?…",
    ]


START = "import sys\nfor name in sys.argv.pop(1).split(','):\n    sys.modules[name] = None\n"
START += "from octavo_serve.cli import main\nsys.exit(main())"


@pytest.mark.parametrize("missing", ["opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry"])
def test_without_the_extra_the_option_is_refused_at_once(missing):
    command = [
        sys.executable,
        "-c",
        START,
        missing,
        "no-such-model",
        "--otlp-traces-endpoint",
        "http://c:4318",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "octavo-serve: otlp_traces_endpoint needs OpenTelemetry, which is not installed: "
        "`pip install 'octavo-serve[otel]'`, or `uv add 'octavo-serve[otel]'`\n"
    )


@pytest.mark.parametrize(
    "url",
    [
        "",
        "collector",
        "localhost:4318",
        "grpc://c:4317",
        "http://",
        "http:///v1",
        "http://c:70000",
        "http://[c",
    ],
)
def test_what_is_no_url_of_a_collector(url):
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint must be a URL .* http://localhost:4318/v1/"):
        ServeConfig(otlp_traces_endpoint=url)


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("https://c", "https://c/v1/traces"),
        ("http://c:4318/", "http://c:4318/"),
        ("http://c/api/otlp?x=1", "http://c/api/otlp?x=1"),
        ("http://c?x=1", "http://c/v1/traces?x=1"),
    ],
)
def test_an_endpoint_without_a_path_gets_the_usual_one(given, used):
    assert with_path(given) == used


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"])
def test_another_protocol_is_refused(monkeypatch, variable):
    monkeypatch.setenv(variable, "grpc")
    with pytest.raises(ConfigError, match=f"{variable}=grpc is not supported: .* usually 4318"):
        check()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    check()


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OTEL_BSP_MAX_QUEUE_SIZE", "0"), ("OTEL_PROPAGATORS", "nobody")],
)
def test_a_variable_that_opentelemetry_refuses_is_one_line(variable, value):
    code = "from octavo_serve.tracing import open_traces; open_traces('http://127.0.0.1:1')"
    command = [sys.executable, "-c", code]
    environment = os.environ | {variable: value}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert "ConfigError: otlp_traces_endpoint: OpenTelemetry cannot be set up: " in done.stderr


def test_open_traces_of_a_good_environment():
    assert isinstance(open_traces("http://127.0.0.1:1"), Traces)
