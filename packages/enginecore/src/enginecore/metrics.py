"""Metrics of one engine, by vLLM's names; the prefix is `octavo_` unless another is asked for."""

import platform
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import prometheus_client
from prometheus_client.metrics_core import Metric

from enginecore.config import EngineConfig
from enginecore.errors import ConfigError
from enginecore.messages import EngineLimits, EngineStats, Outputs

if TYPE_CHECKING:
    from enginecore.frontend.output_processor import RequestState

PREFIX = "octavo_"
"""Of all names, unless another is asked for; with `vllm:` the names are vLLM's."""

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SAMPLES = (1, 2, 5, 10, 20)
_FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True)
class Counter:
    """A count since the start. The name is without the `_total` of Prometheus' text."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Gauge:
    """A value that goes up and down."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """A distribution: `buckets` count the values up to each bound, which is given as text."""

    name: str
    labels: dict[str, str]
    count: int
    sum: float
    buckets: dict[str, int]


class Metrics:
    """Metrics of one engine as a front-end sees it.

    Raises:
        ConfigError: a metric's name cannot begin with `prefix`.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"
    """Of `text`."""

    def __init__(self, model_name: str, prefix: str = PREFIX) -> None:
        if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", prefix):
            raise ConfigError(
                f"metrics_prefix must be of letters, digits, _ and :, the first no digit, got {prefix!r}"
            )
        self._registry = prometheus_client.CollectorRegistry()
        self._model = model_name
        self._prefix = prefix
        self.running = self._gauge("num_requests_running", "Requests that hold KV cache")
        self.waiting = self._gauge("num_requests_waiting", "Requests in the queue")
        self.kv_usage = self._gauge("kv_cache_usage_perc", "Share of KV cache blocks in use, 0 to 1")
        self.up = self._gauge("engine_up", "1 while the engine is loaded and runs")
        self.preemptions = self._counter("num_preemptions", "Preempted requests")
        self.prefix_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache"
        )
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that ran")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self.iteration_tokens = self._histogram("iteration_tokens_total", "Tokens that a step ran", _TOKENS)
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token", _SECONDS
        )
        self.itl = self._histogram("inter_token_latency_seconds", "Between tokens of a request", _SECONDS)
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "From arrival to the first step", _SECONDS
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the last token", _SECONDS)
        self._requests = _RequestHistograms(self)
        self._success = prometheus_client.Counter(
            f"{prefix}request_success",
            "Requests that ended, by reason",
            ["model_name", "engine", "finished_reason"],
            registry=self._registry,
        )
        self._by_reason = {
            reason: self._success.labels(model_name, "0", reason) for reason in _FINISH_REASONS
        }
        self._http = prometheus_client.Counter(
            "http_requests",
            "HTTP requests answered, by method, route and status",
            ["method", "handler", "status"],
            registry=self._registry,
        )
        self._info("build", "Versions", version=version("enginecore"), python=platform.python_version())
        prometheus_client.ProcessCollector(registry=self._registry)
        self._last = EngineStats()

    def loaded(self, config: EngineConfig, limits: EngineLimits) -> None:
        """Tell of a model that is ready."""
        self.up.set(1)
        self._info(
            "model",
            "The model",
            model_name=self._model,
            model=config.model,
            device=limits.device,
            dtype=limits.dtype,
            max_model_len=limits.max_model_len,
        )
        self._info(
            "cache_config",
            "The KV cache",
            engine="0",
            block_size=limits.block_size,
            num_gpu_blocks=limits.num_blocks,
            num_cpu_blocks=limits.host_blocks,
            kv_cache_size_tokens=limits.num_blocks * limits.block_size,
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            cache_dtype=config.kv_cache_dtype,
            enable_prefix_caching=config.enable_prefix_caching,
            gpu_memory_utilization=config.gpu_memory_utilization,
            sliding_window=limits.window,
        )

    def record(self, outputs: Outputs, changed: Iterable["RequestState"]) -> None:
        """Take in a step's outputs, and the requests that they changed."""
        if outputs.stats is not None:
            self.observe(outputs.stats)
        for _, waited in outputs.scheduled.values():
            self.queue_time.observe(waited)
        now = time.time()
        for state in changed:
            if state.last_token_time is None:
                self.ttft.observe(max(0.0, now - state.metrics.arrival_time))
            else:
                self.itl.observe(now - state.last_token_time)
            state.last_token_time = now
            if state.finished:
                reasons = [sample.finish_reason or "stop" for sample in state.samples]
                self._end(state, "error" if "error" in reasons else reasons[-1], now)

    def ended_early(self, state: "RequestState", reason: str) -> None:
        """Count a request that ended without its last output."""
        self._end(state, reason, time.time())

    def observe(self, stats: EngineStats) -> None:
        """Take in the core's state after a step."""
        self.running.set(stats.running)
        self.waiting.set(stats.waiting)
        self.kv_usage.set(stats.kv_cache_usage)
        for counter, name in (
            (self.preemptions, "preemptions"),
            (self.prefix_queries, "prefix_queries"),
            (self.prefix_hits, "prefix_hits"),
            (self.prompt_tokens, "prompt_tokens"),
            (self.generation_tokens, "generation_tokens"),
        ):
            counter.inc(getattr(stats, name) - getattr(self._last, name))
        if stats.generation_tokens != self._last.generation_tokens:
            self.iteration_tokens.observe(stats.step_tokens)
        self._last = stats

    def answered(self, method: str, handler: str, status: int) -> None:
        """Count an HTTP request; `handler` is its route's path, not the client's."""
        self._http.labels(method, handler, str(status)).inc()

    def stopped(self) -> None:
        """Show nothing as running: the engine has ended."""
        for gauge in (self.running, self.waiting, self.kv_usage, self.up):
            gauge.set(0)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return prometheus_client.generate_latest(self)

    def values(self) -> list[Counter | Gauge | Histogram]:
        """Return the engine's metrics as plain data; those of the process and of HTTP are left out."""
        found: list[Counter | Gauge | Histogram] = []
        for family in self.collect():
            if family.name.startswith(self._prefix):
                found += _values(family)
        return found

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as prometheus_client's, without the time at which each was made."""
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family

    def _end(self, state: "RequestState", reason: str, now: float) -> None:
        self._by_reason[reason].inc()
        self.e2e.observe(max(0.0, now - state.metrics.arrival_time))
        if reason in ("stop", "length"):
            self._requests.observe(state, now)

    def _info(self, name: str, text: str, **labels: Any) -> None:
        info = prometheus_client.Info(f"{self._prefix}{name}", text, registry=self._registry)
        info.info({label: str(value) for label, value in labels.items()})

    def _gauge(self, name: str, text: str) -> prometheus_client.Gauge:
        return self._labelled(prometheus_client.Gauge, name, text)

    def _counter(self, name: str, text: str) -> prometheus_client.Counter:
        return self._labelled(prometheus_client.Counter, name, text)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> prometheus_client.Histogram:
        return self._labelled(prometheus_client.Histogram, name, text, buckets=buckets)

    def _labelled(self, kind: Any, name: str, text: str, **options: Any) -> Any:
        labels = ["model_name", "engine"]
        metric = kind(f"{self._prefix}{name}", text, labels, registry=self._registry, **options)
        return metric.labels(self._model, "0")


class _RequestHistograms:
    """Distributions over requests that ran to their end: tokens, parameters, and how long each part took."""

    def __init__(self, metrics: Metrics) -> None:
        def tokens(name: str, text: str) -> prometheus_client.Histogram:
            return metrics._histogram(f"request_{name}", text, _TOKENS)

        def seconds(name: str, text: str) -> prometheus_client.Histogram:
            return metrics._histogram(f"request_{name}_seconds", text, _SECONDS)

        self._prompt = tokens("prompt_tokens", "Tokens of a prompt")
        self._generated = tokens("generation_tokens", "Tokens generated for a request, of all its samples")
        self._longest = tokens("max_num_generation_tokens", "Tokens of a request's longest sample")
        self._max_tokens = tokens("params_max_tokens", "The parameter max_tokens")
        self._n = metrics._histogram("request_params_n", "The parameter n", _SAMPLES)
        self._prefill = seconds("prefill_time", "From the first step to the first token")
        self._decode = seconds("decode_time", "From the first token to the last")
        self._inference = seconds("inference_time", "From the first step to the last token")
        self._per_token = seconds("time_per_output_token", "Mean time between a request's tokens")

    def observe(self, state: "RequestState", now: float) -> None:
        """Take in a request that has finished."""
        params, times = state.request.params, state.metrics
        lengths = [sample.num_tokens for sample in state.samples]
        self._prompt.observe(len(state.request.prompt.token_ids))
        self._generated.observe(sum(lengths))
        self._longest.observe(max(lengths))
        self._n.observe(params.n)
        if params.max_tokens is not None:
            self._max_tokens.observe(params.max_tokens)
        started = times.arrival_time + (times.time_in_queue or 0.0)
        first = times.first_token_time or now
        self._prefill.observe(max(0.0, first - started))
        self._decode.observe(max(0.0, now - first))
        self._inference.observe(max(0.0, now - started))
        if max(lengths) > 1:
            self._per_token.observe(max(0.0, now - first) / (max(lengths) - 1))


def _values(family: Metric) -> Iterator[Counter | Gauge | Histogram]:
    if family.type != "histogram":
        kind = Counter if family.type == "counter" else Gauge
        name = f"{family.name}_info" if family.type == "info" else family.name
        for sample in family.samples:
            yield kind(name, dict(sample.labels), sample.value)
        return
    # The engine's histograms have one series each.
    samples = {sample.name.removeprefix(family.name): sample for sample in family.samples}
    buckets = {sample.labels["le"]: int(sample.value) for sample in family.samples if "le" in sample.labels}
    count, total = samples["_count"], samples["_sum"]
    yield Histogram(family.name, dict(count.labels), int(count.value), total.value, buckets)
