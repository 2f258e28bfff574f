"""A collector of spans by OTLP over HTTP, in the test's own process."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

LIMIT_S = 60


class Post(NamedTuple):
    """An export as it came."""

    path: str
    headers: dict[str, str]
    body: bytes


class Received(NamedTuple):
    """A span as protobuf has it, its attributes and those of its resource."""

    span: Span
    attributes: dict[str, Any]
    resource: dict[str, Any]

    @property
    def is_request(self) -> bool:
        """Whether it is a request's span, rather than that of one of its phases."""
        return self.span.kind == Span.SPAN_KIND_SERVER


class Collector:
    """Keeps what is exported to it."""

    def __init__(self) -> None:
        self.status = 200
        """Answered to the next exports."""
        self.answers = threading.Event()
        """While it is cleared nothing is answered."""
        self.answers.set()
        self.posts: list[Post] = []
        self._changed = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def stop(self) -> None:
        self.answers.set()
        self._server.shutdown()
        self._server.server_close()

    def wait_for_posts(self, count: int) -> None:
        """Wait until so many exports have come."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.posts) >= count, LIMIT_S), self.posts

    @property
    def spans(self) -> list[Received]:
        """All spans of all exports, in the order of their ends."""
        found = []
        for post in list(self.posts):
            request = ExportTraceServiceRequest.FromString(post.body)
            for of_resource in request.resource_spans:
                resource = attributes(of_resource.resource)
                for scope in of_resource.scope_spans:
                    found += [Received(span, attributes(span), resource) for span in scope.spans]
        return sorted(found, key=lambda received: received.span.end_time_unix_nano)

    @property
    def requests(self) -> list[Received]:
        return [received for received in self.spans if received.is_request]

    def phases(self, parent: Received) -> dict[str, Span]:
        """Return the phases of a request by name."""
        spans = [received.span for received in self.spans]
        return {span.name: span for span in spans if span.parent_span_id == parent.span.span_id}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                status = collector.status
                with collector._changed:
                    collector.posts.append(
                        Post(self.path, {k.lower(): v for k, v in self.headers.items()}, body)
                    )
                    collector._changed.notify_all()
                collector.answers.wait(LIMIT_S)
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        return Handler


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    try:
        yield collector
    finally:
        collector.stop()


def attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes of a span or a resource as Python's own values."""
    return {entry.key: _value(entry.value) for entry in owner.attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(entry) for entry in value.array_value.values]
    assert kind is not None
    return getattr(value, kind)
