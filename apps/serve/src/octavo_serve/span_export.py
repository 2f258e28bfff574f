"""Makes spans of requests that have ended, and exports them in batches from a thread.

A span is made at its request's end, so that nothing is done for tracing while tokens come.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Self
from urllib.parse import urlsplit
from uuid import uuid4

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode

from enginecore import __version__
from octavo_serve import spans, tracing
from octavo_serve.records import Answered

_SECONDS_TO_SEND_LAST_SPANS = 3.0
"""At least, whatever is left of the shutdown timeout."""
_SECONDS_BETWEEN_LOOKS = 0.02
_UNNAMED = "unknown_service"
"""Beginning of the service's name where no variable gives one."""
_BATCHES = "opentelemetry.sdk._shared_internal"
"""Logger of the SDK's batch processor, which tells of each span that finds the queue full."""

logger = logging.getLogger(__name__)


class Traces:
    """Takes the spans of requests that generate; of one HTTP process."""

    def __init__(self, exporter: SpanExporter) -> None:
        """The OTEL_* variables of the environment choose resource, sampler, limits, batches, propagators.

        Raises:
            ValueError: one of them has a wrong value.
        """
        self._exporter = exporter
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("octavo_serve", __version__)

    @classmethod
    def to_collector(cls, url: str) -> Self:
        """Return one that exports by OTLP over HTTP; raises as the class does."""
        return cls(LoggedExporter(trace_exporter.OTLPSpanExporter(endpoint=url), url))

    def add(self, headers: Iterable[tuple[bytes, bytes]], operation: str, answered: Answered) -> str | None:
        """Take the span of a request that has just ended, and return its trace's id.

        `headers` are those of the request: with a `traceparent` the span continues that trace, and is
        dropped where that is not sampled.
        """
        end = time.time_ns()
        start = end - int(answered.seconds * 1e9)
        span = self._tracer.start_span(
            spans.name_of(operation, answered.record),
            propagate.extract(_carrier(headers)),
            SpanKind.SERVER,
            spans.route_attributes(operation, answered),
            start_time=start,
        )
        if span.is_recording():
            span.set_attributes(spans.attributes(answered))
            if spans.is_failure(spans.error_type(answered)):
                span.set_status(StatusCode.ERROR)
            self._add_phases(trace.set_span_in_context(span, Context()), answered, start, end)
        span.end(end)
        context = span.get_span_context()
        return trace.format_trace_id(context.trace_id) if context.is_valid else None

    async def close(self, seconds: float, hurry: asyncio.Event) -> None:
        """Export what is left, for at most so many seconds, or 3 if that is more or once `hurry` is set."""
        # A thread that nobody waits for: an export cannot be cancelled.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True, name="spans-shutdown")
        closing.start()
        loop = asyncio.get_running_loop()
        soon = loop.time() + _SECONDS_TO_SEND_LAST_SPANS
        deadline = max(soon, loop.time() + seconds)
        while closing.is_alive():
            if loop.time() >= (soon if hurry.is_set() else deadline):
                logger.warning("the last spans could not be exported in time")
                return
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)

    def _add_phases(self, parent: Context, answered: Answered, start: int, end: int) -> None:
        times = answered.record.times()
        for phase in [] if times is None else spans.phases(times, end / 1e9):
            # The engine's clock is the same, but read apart from the span's ends.
            began, ended = (min(max(int(at * 1e9), start), end) for at in (phase.start, phase.end))
            self._tracer.start_span(phase.name, parent, start_time=began).end(ended)


class LoggedExporter(SpanExporter):
    """Exports with another exporter, and logs once when that begins to fail and when it works again.

    OpenTelemetry's own line for each attempt of each batch is left out.
    """

    def __init__(self, exporter: SpanExporter, url: str) -> None:
        self._exporter = exporter
        self._shown = tracing.without_secrets(url)
        self._lost = 0
        """Spans since the last export that worked."""
        self._reasons = _FirstMessage(urlsplit(url).query)
        _add_filter(trace_exporter.__name__, self._reasons)
        _add_filter(_BATCHES, _OncePerMessage())

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._reasons.first = None
        try:
            result = self._exporter.export(spans)
        except OSError as error:  # of requests; the exporter of OpenTelemetry 1.38 lets it through
            self._reasons.keep(str(error))
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            if self._lost:
                logger.info("spans are exported to %s again, %d were lost", self._shown, self._lost)
                self._lost = 0
        else:
            if not self._lost:
                logger.warning("spans cannot be exported to %s: %s", self._shown, self._reasons.first)
            self._lost += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _FirstMessage(logging.Filter):
    """Keeps a logger's first message, and lets none pass."""

    def __init__(self, secret: str) -> None:
        """`secret` is taken out of the text."""
        super().__init__()
        self._secret = secret
        self.first: str | None = None
        """None until there is one; set it to None to wait for another."""

    def filter(self, record: logging.LogRecord) -> bool:
        self.keep(record.getMessage())
        return False

    def keep(self, text: str) -> None:
        """Keep `text` if it is the first."""
        if self.first is None:
            self.first = text.replace(self._secret, "…") if self._secret else text


class _OncePerMessage(logging.Filter):
    """Lets each message of a logger pass once."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        is_new = record.msg not in self._seen
        self._seen.add(record.msg)
        return is_new


def _add_filter(name: str, added: logging.Filter) -> None:
    """Give a logger a filter in place of an earlier one of its kind."""
    found = logging.getLogger(name)
    for earlier in [entry for entry in found.filters if type(entry) is type(added)]:
        found.removeFilter(earlier)
    found.addFilter(added)


def _resource() -> Resource:
    """Return what describes this process; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come first."""
    own = Resource({"service.version": __version__, "service.instance.id": uuid4().hex})
    found = own.merge(Resource.create())
    if str(found.attributes[SERVICE_NAME]).startswith(_UNNAMED):
        return found.merge(Resource({SERVICE_NAME: "octavo-serve"}))
    return found


def _carrier(headers: Iterable[tuple[bytes, bytes]]) -> Mapping[str, str]:
    """Return headers as propagators read them; those that come twice are joined (RFC 9110, section 5.3)."""
    found: dict[str, str] = {}
    for name, value in headers:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        found[key] = f"{found[key]},{text}" if key in found else text
    return found
