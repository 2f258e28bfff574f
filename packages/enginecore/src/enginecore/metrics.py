"""Counters, gauges and histograms of one engine, by vLLM's names with the prefix `octavo_`."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from enginecore.messages import EngineStats

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
_FINISH_REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """Metrics of one engine as a front-end sees it."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"
    """Of `text`."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model_name
        self.running = self._gauge("num_requests_running", "Requests that hold KV cache")
        self.waiting = self._gauge("num_requests_waiting", "Requests in the queue")
        self.kv_usage = self._gauge("kv_cache_usage_perc", "Share of KV cache blocks in use, 0 to 1")
        self.preemptions = self._counter("num_preemptions", "Preempted requests")
        self.prefix_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache"
        )
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that ran")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token", _SECONDS
        )
        self.itl = self._histogram("inter_token_latency_seconds", "Between tokens of a request", _SECONDS)
        self.e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the last token", _SECONDS)
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "From arrival to the first step", _SECONDS
        )
        self.iteration_tokens = self._histogram("iteration_tokens_total", "Tokens that a step ran", _TOKENS)
        self._success = Counter(
            "octavo_request_success",
            "Requests that ended, by reason",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._by_reason = {reason: self._success.labels(model_name, reason) for reason in _FINISH_REASONS}
        self._last = EngineStats()

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

    def first_token(self, arrival: float) -> None:
        """Count a request's first token; `arrival` is in seconds since the epoch."""
        self.ttft.observe(max(0.0, time.time() - arrival))

    def finished(self, arrival: float, reason: str) -> None:
        """Count a request's end, once for each request."""
        self._by_reason[reason].inc()
        self.e2e.observe(max(0.0, time.time() - arrival))

    def stopped(self) -> None:
        """Show nothing as running: the engine has ended."""
        for gauge in (self.running, self.waiting, self.kv_usage):
            gauge.set(0)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"octavo_{name}", text, ["model_name"], registry=self._registry).labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"octavo_{name}", text, ["model_name"], registry=self._registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"octavo_{name}", text, ["model_name"], registry=self._registry, buckets=buckets
        ).labels(self._model)
