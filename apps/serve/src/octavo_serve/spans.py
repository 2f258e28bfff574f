"""The span of a request: its name, attributes and phases, by OpenTelemetry's conventions and vLLM's names.

Sources: the semantic conventions of generative AI and of HTTP (opentelemetry.io/docs/specs/semconv), and for
`gen_ai.latency.*`, `gen_ai.request.id` and `.n`, `gen_ai.usage.prompt_tokens` and `.completion_tokens`
vLLM's `vllm.tracing`. Needs nothing of OpenTelemetry.
"""

from collections.abc import Mapping
from typing import NamedTuple

from octavo_serve.records import CLIENT_LEFT, Answered, RequestRecord, Times

OPERATIONS: Mapping[tuple[str, str], str] = {
    ("POST", "/v1/completions"): "text_completion",
    ("POST", "/v1/chat/completions"): "chat",
    ("POST", "/v1/responses"): "chat",
    ("POST", "/v1/messages"): "chat",
    ("POST", "/v1/embeddings"): "embeddings",
    ("POST", "/score"): "score",
    ("POST", "/v1/score"): "score",
    ("POST", "/rerank"): "rerank",
    ("POST", "/v1/rerank"): "rerank",
    ("POST", "/v2/rerank"): "rerank",
    ("WS", "completion"): "text_completion",
    ("WS", "chat"): "chat",
}
"""`gen_ai.operation.name` of the requests that have a span, by method and route or type of frame."""

TRACE_FIELDS = ("traceparent", "tracestate")
"""Fields by which a WebSocket's frame continues a trace: W3C Trace Context's headers."""

Value = str | bool | int | float | list[str]

_WEBSOCKET = "WS"
_SAMPLING = ("max_tokens", "temperature", "top_p", "seed")
_SAMPLING_IF_USED = ("top_k", "frequency_penalty", "presence_penalty")


class Phase(NamedTuple):
    """A part of a request's time in the engine, in seconds since the epoch."""

    name: str
    start: float
    end: float


def name_of(operation: str, record: RequestRecord) -> str:
    """Return the span's name, which has no other model than those that are served."""
    return operation if record.model is None else f"{operation} {record.model}"


def route_attributes(operation: str, answered: Answered) -> dict[str, Value]:
    """Return the attributes that samplers may decide by."""
    found: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "octavo",
        "http.route": answered.route,
    }
    if answered.method != _WEBSOCKET:
        found["http.request.method"] = answered.method
    return found


def attributes(answered: Answered) -> dict[str, Value]:
    """Return what the request asked for and came to; no text of it, of its answer or of a key."""
    found: dict[str, Value] = {}
    if answered.method != _WEBSOCKET:
        found["http.response.status_code"] = answered.status
    record = answered.record
    if record.id is not None:
        found |= _asked(record) | _used(record)
    times = record.times()
    if times is not None:
        found |= _latencies(times)
    error = error_type(answered)
    if error is not None:
        found["error.type"] = error
    return found


def error_type(answered: Answered) -> str | None:
    """Return what kept a request from its whole answer: a status, `aborted` or `client_disconnected`."""
    record = answered.record
    if answered.status == CLIENT_LEFT:
        return "client_disconnected"
    if answered.status >= 400:
        return str(answered.status)
    if record.failure is not None:
        return record.failure
    return "client_disconnected" if record.unfinished else None


def is_failure(error: str | None) -> bool:
    """Return whether an `error_type` is the server's fault, which makes the span's status an error."""
    return error is not None and error.isdecimal() and int(error) >= 500


def phases(times: Times, end: float) -> list[Phase]:
    """Return the phases that a request came to; the last one, if it did not finish, lasts until `end`."""
    started = [("queue", times.arrival), ("prefill", times.scheduled), ("decode", times.first_token)]
    starts = [(name, start) for name, start in started if start is not None]
    ends = [start for _, start in starts[1:]] + [end if times.finished is None else times.finished]
    return [
        Phase(name, start, max(start, stop))
        for (name, start), stop in zip(starts, ends, strict=True)
        # A single token, or a vector, comes with the prefill.
        if name != "decode" or stop > start
    ]


def _asked(record: RequestRecord) -> dict[str, Value]:
    assert record.id is not None and record.model is not None
    found: dict[str, Value] = {
        "gen_ai.request.model": record.model,
        "gen_ai.request.id": record.id,
        "gen_ai.request.n": record.samples,
    }
    if record.samples > 1:
        found["gen_ai.request.choice.count"] = record.samples
    if record.streams:
        found["gen_ai.request.stream"] = True
    params = record.params
    if params is not None:
        found |= {
            f"gen_ai.request.{name}": value
            for name in _SAMPLING
            if (value := getattr(params, name)) is not None
        }
        found |= {
            f"gen_ai.request.{name}": value
            for name in _SAMPLING_IF_USED
            if (value := getattr(params, name)) not in (0, -1)
        }
    return found


def _used(record: RequestRecord) -> dict[str, Value]:
    assert record.id is not None and record.model is not None
    read, written = record.prompt_tokens, record.generated
    found: dict[str, Value] = {
        "gen_ai.response.id": record.id,
        "gen_ai.response.model": record.model,
        "gen_ai.usage.input_tokens": read,
        "gen_ai.usage.output_tokens": written,
        "gen_ai.usage.prompt_tokens": read,
        "gen_ai.usage.completion_tokens": written,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
    }
    reasons = record.finish_reasons
    return found | {"gen_ai.response.finish_reasons": reasons} if reasons else found


def _latencies(times: Times) -> dict[str, Value]:
    arrival, scheduled, first, finished = times
    spans = {
        "time_in_queue": (arrival, scheduled),
        "time_to_first_token": (arrival, first),
        "time_in_model_prefill": (scheduled, first),
        "time_in_model_decode": (first, finished),
        "time_in_model_inference": (scheduled, finished),
        "e2e": (arrival, finished),
    }
    return {
        f"gen_ai.latency.{name}": max(0.0, end - start)
        for name, (start, end) in spans.items()
        if start is not None and end is not None
    }
