"""Metrics of one engine, by vLLM's names; the prefix is `octavo_` unless another is asked for."""

import itertools
import math
import os
import platform
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import prometheus_client
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.utils import floatToGoString

from enginecore.config import EngineConfig
from enginecore.errors import ConfigError
from enginecore.messages import STEP_BOUNDS, EngineLimits, EngineStats, Outputs
from enginecore.outputs import RequestMetrics

if TYPE_CHECKING:
    from enginecore.frontend.output_processor import Processed
    from enginecore.frontend.request_state import RequestState

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
_TOKENS = STEP_BOUNDS
_SAMPLES = (1, 2, 5, 10, 20)
_FINISH_REASONS = ("stop", "length", "abort", "error")
_LABELS = ("model_name", "engine")
_INFO = {"build": "Versions", "model": "The model", "cache_config": "The KV cache"}


@dataclass(frozen=True, slots=True)
class Counter:
    """A count since the start."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Gauge:
    """A value that goes up and down."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(slots=True)
class Histogram:
    """A distribution: `buckets` count the values up to each bound, which is given as text."""

    name: str
    labels: dict[str, str]
    count: int
    sum: float
    buckets: dict[str, int]


Metric = Counter | Gauge | Histogram
"""A metric's state, by the name that it has in Prometheus' text."""


class Ended(NamedTuple):
    """Counts and times of a request, taken when it ends."""

    prompt_tokens: int
    lengths: Sequence[int]
    """Tokens of each sample."""
    n: int
    max_tokens: int | None
    times: RequestMetrics

    @classmethod
    def of(cls, state: "RequestState") -> Self:
        """Return it of a request that has ended."""
        request = state.request
        return cls(
            len(request.prompt.token_ids),
            [sample.num_tokens for sample in state.samples],
            request.params.n,
            request.params.max_tokens if request.pooling is None else None,
            state.metrics,
        )


class Metrics:
    """Metrics of an engine and its ranks as a front-end sees them.

    What ranks count is read from them when it is asked for; requests are counted here. With `folder`, an
    empty one that several processes share, each counts there, and each shows the sum of all.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"
    """Of `text`."""

    def __init__(
        self,
        model_name: str,
        prefix: str = PREFIX,
        *,
        stats: Callable[[], Mapping[int, EngineStats]] = dict,
        ranks: Sequence[int] = (0,),
        folder: str | None = None,
    ) -> None:
        """`stats` returns the state of each of `ranks`; counters count from the start of the whole.

        The environment variable PROMETHEUS_MULTIPROC_DIR must have been `folder` when Python was started.

        Raises:
            ConfigError: a metric's name cannot begin with `prefix`.
        """
        if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", prefix):
            raise ConfigError(
                f"metrics_prefix must be of letters, digits, _ and :, the first no digit, got {prefix!r}"
            )
        self._registry = prometheus_client.CollectorRegistry()
        self._shared = None if folder is None else MultiProcessCollector(None, folder)
        self._model = model_name
        self._prefix = prefix
        self._stats = stats
        self._up: set[int] = set()
        self._engine: dict[str, dict[str, Any]] = {
            "build": {"version": version("enginecore"), "python": platform.python_version()}
        }
        """Labels of what is always 1, by name."""
        self._ranks: dict[int, _RankMetrics] = {}
        self.ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token")
        self.itl = self._histogram("inter_token_latency_seconds", "Between tokens of a request")
        self.queue_time = self._histogram("request_queue_time_seconds", "From arrival to the first step")
        self.e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the last token")
        self.requests = _RequestHistograms(self._histogram)
        self.success = prometheus_client.Counter(
            f"{prefix}request_success",
            "Requests that ended, by reason",
            [*_LABELS, "finished_reason"],
            registry=self._registry,
        )
        # Not as the ranks count them: those of a step that died with its rank are generated again.
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that ran")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self._http = prometheus_client.Counter(
            "http_requests",
            "HTTP requests answered, by method, route and status",
            ["method", "handler", "status"],
            registry=self._registry,
        )
        self.in_progress = prometheus_client.Gauge(
            "http_requests_in_progress",
            "HTTP requests that generate",
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        # Of several processes any may be asked: their parent stands for all.
        pid = (lambda: "self") if folder is None else os.getppid
        self._process = prometheus_client.ProcessCollector(pid=pid, registry=None)
        self._first = ranks[0]
        for rank in ranks:
            self._rank(rank)

    def loaded(self, config: EngineConfig, limits: EngineLimits) -> None:
        """Tell of a model that is ready."""
        self._engine["model"] = {
            "model_name": self._model,
            "model": config.model,
            "device": limits.device,
            "dtype": limits.dtype,
            "max_model_len": limits.max_model_len,
        }
        self._engine["cache_config"] = {
            "engine": 0,
            "block_size": limits.block_size,
            "num_gpu_blocks": limits.num_blocks,
            "num_cpu_blocks": limits.host_blocks,
            "kv_cache_size_tokens": limits.num_blocks * limits.block_size,
            "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "sliding_window": limits.window,
        }

    def rank_up(self, rank: int) -> None:
        """Tell of a rank that takes requests."""
        self._up.add(rank)
        self._rank(rank)

    def rank_down(self, rank: int) -> None:
        """Tell of a rank that has ended."""
        self._up.discard(rank)

    def stopped(self) -> None:
        """Show nothing as running: the engine has ended."""
        self._up.clear()

    def record(self, outputs: Outputs, processed: "Processed", rank: int = 0) -> None:
        """Take in a step's outputs, and what they have changed. Those of beams are left to `searched`."""
        mine = self._rank(rank)
        beams = [state for state in processed.scheduled if not state.request.counted]
        numbers = {state.samples[0].message.number for state in beams}
        in_beams = sum(len(state.request.prompt.token_ids) for state in beams)
        mine.prompt_tokens.inc(processed.prompt_tokens - in_beams)
        for number, (_, waited) in outputs.scheduled.items():
            if number not in numbers:
                mine.queue_time.observe(waited)
        now = time.time()
        since: dict[float, int] = {}
        generated = processed.generated_tokens
        for state in processed.changed:
            if not state.request.counted:
                generated -= state.samples[0].num_tokens
                continue
            if state.last_token_time is None:
                # A request that the core refused ends without a token.
                if state.metrics.first_token_time is not None:
                    mine.ttft.observe(max(0.0, now - state.metrics.arrival_time))
            else:
                since[state.last_token_time] = since.get(state.last_token_time, 0) + 1
            state.last_token_time = now
            if state.unfinished == 0:
                reasons = [sample.finish_reason or "stop" for sample in state.samples]
                mine.end(Ended.of(state), "error" if "error" in reasons else reasons[-1], now)
        mine.generation_tokens.inc(generated)
        # Requests that run together got their last tokens together.
        for before, count in since.items():
            mine.itl.observe(max(0.0, now - before), count)

    def ended_early(self, state: "RequestState", reason: str) -> None:
        """Count a request that ended without its last output."""
        if state.request.counted:
            self._rank(self._first).end(Ended.of(state), reason, time.time())

    def searched(self, ended: Ended, token_times: Sequence[float], reason: str) -> None:
        """Count a beam search as one request, of the first rank: its rounds may have run on several.

        Args:
            ended: Of the beams that it found, or has found so far.
            token_times: End of each round, in seconds since the epoch.
            reason: Why it ended.
        """
        mine, times = self._rank(self._first), ended.times
        if token_times:
            mine.prompt_tokens.inc(ended.prompt_tokens)
            mine.generation_tokens.inc(sum(ended.lengths))
            mine.queue_time.observe(times.time_in_queue or 0.0)
            mine.ttft.observe(max(0.0, token_times[0] - times.arrival_time))
            for before, after in itertools.pairwise(token_times):
                mine.itl.observe(max(0.0, after - before))
        mine.end(ended, reason, time.time())

    def answered(self, method: str, handler: str, status: int) -> None:
        """Count an HTTP request; `handler` is its route's path, not the client's."""
        self._http.labels(method, handler, str(status)).inc()

    def num_in_progress(self) -> int:
        """Return the HTTP requests that generate, in all processes."""
        return sum(
            int(sample.value)
            for family in self._counted()
            if family.name == "http_requests_in_progress"
            for sample in family.samples
        )

    def latencies(self) -> dict[str, list[tuple[float, int]]]:
        """Return how many times to first token, `ttft`, and between tokens, `itl`, were how long.

        Each is a list of upper bounds in seconds, the last infinite, with the values up to there and above
        the bound before, of all processes and ranks since the start.
        """
        names = {self._name_of("time_to_first_token_seconds"): "ttft"}
        names[self._name_of("inter_token_latency_seconds")] = "itl"
        totals: dict[str, dict[float, int]] = {short: {} for short in names.values()}
        for family in self._counted():
            if family.name not in names:
                continue
            total = totals[names[family.name]]
            for sample in family.samples:
                if "le" in sample.labels:
                    bound = float(sample.labels["le"])
                    total[bound] = total.get(bound, 0) + int(sample.value)
        found = {}
        for short, total in totals.items():
            bounds = sorted(total)
            counts = [total[bound] for bound in bounds]
            found[short] = [
                (bound, count - before) for bound, count, before in zip(bounds, counts, [0, *counts])
            ]
        return found

    def _name_of(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return prometheus_client.generate_latest(self)

    def values(self) -> list[Metric]:
        """Return the engine's metrics as plain data; those of the process and of HTTP are left out."""
        found: list[Metric] = []
        for family in self.collect():
            if family.name.startswith(self._prefix):
                found += _values(family)
        return found

    def collect(self) -> Iterator[Family]:
        """Yield the metrics as prometheus_client's."""
        yield from engine_families(self._prefix, self._model, self._stats(), self._up)
        for name, labels in self._engine.items():
            info = InfoMetricFamily(f"{self._prefix}{name}", _INFO[name])
            info.add_metric([], {label: str(value) for label, value in labels.items()})
            yield info
        yield from self._counted()
        yield from self._process.collect()

    def _counted(self) -> Iterator[Family]:
        """Yield what is counted here, without the time at which each was made."""
        for family in (self._shared or self._registry).collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family

    def _rank(self, rank: int) -> "_RankMetrics":
        if rank not in self._ranks:
            self._ranks[rank] = _RankMetrics(self, [self._model, str(rank)])
        return self._ranks[rank]

    def _counter(self, name: str, text: str) -> prometheus_client.Counter:
        return prometheus_client.Counter(f"{self._prefix}{name}", text, _LABELS, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> "_Histogram":
        return _Histogram(f"{self._prefix}{name}", text, _LABELS, registry=self._registry, buckets=buckets)


class _Histogram(prometheus_client.Histogram):
    """A histogram that takes a value many times over at once: a step has as many as rows, of few values."""

    def observe(self, amount: float, count: int = 1) -> None:  # ty: ignore[incompatible-method-override]
        """Count `amount` `count` times."""
        self._sum.inc(amount * count)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(count)


class _RankMetrics:
    """Counters and histograms of the requests that one rank ran."""

    def __init__(self, metrics: Metrics, labels: Sequence[str]) -> None:
        self.prompt_tokens = metrics.prompt_tokens.labels(*labels)
        self.generation_tokens = metrics.generation_tokens.labels(*labels)
        self.ttft = metrics.ttft.labels(*labels)
        self.itl: Any = metrics.itl.labels(*labels)
        self.queue_time = metrics.queue_time.labels(*labels)
        self._e2e = metrics.e2e.labels(*labels)
        self._requests = metrics.requests.labelled(labels)
        self._success = {reason: metrics.success.labels(*labels, reason) for reason in _FINISH_REASONS}

    def end(self, ended: Ended, reason: str, now: float) -> None:
        """Count a request that has ended, at `now` in seconds since the epoch."""
        self._success[reason].inc()
        self._e2e.observe(max(0.0, now - ended.times.arrival_time))
        if reason in ("stop", "length"):
            self._requests.observe(ended, now)


class _RequestHistograms:
    """Distributions over requests that ran to their end: tokens, parameters, and how long each part took."""

    def __init__(self, make: Callable[..., Any]) -> None:
        """`make` makes a histogram of a name, a text and buckets, in seconds if none are given."""
        self.prompt = make("request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self.generated = make(
            "request_generation_tokens", "Tokens generated for a request, of all its samples", _TOKENS
        )
        self.longest = make(
            "request_max_num_generation_tokens", "Tokens of a request's longest sample", _TOKENS
        )
        self.max_tokens = make("request_params_max_tokens", "The parameter max_tokens", _TOKENS)
        self.n = make("request_params_n", "The parameter n", _SAMPLES)
        self.prefill = make("request_prefill_time_seconds", "From the first step to the first token")
        self.decode = make("request_decode_time_seconds", "From the first token to the last")
        self.inference = make("request_inference_time_seconds", "From the first step to the last token")
        self.per_token = make("request_time_per_output_token_seconds", "Mean time between a request's tokens")

    def labelled(self, labels: Sequence[str]) -> "_RequestHistograms":
        """Return the histograms of one rank."""
        mine = copy(self)
        for name, histogram in vars(self).items():
            setattr(mine, name, histogram.labels(*labels))
        return mine

    def observe(self, ended: Ended, now: float) -> None:
        """Take in a request that has finished."""
        lengths, times = ended.lengths, ended.times
        self.prompt.observe(ended.prompt_tokens)
        self.generated.observe(sum(lengths))
        self.longest.observe(max(lengths))
        self.n.observe(ended.n)
        if ended.max_tokens is not None:
            self.max_tokens.observe(ended.max_tokens)
        started = times.arrival_time + (times.time_in_queue or 0.0)
        first = times.first_token_time or now
        self.prefill.observe(max(0.0, first - started))
        self.decode.observe(max(0.0, now - first))
        self.inference.observe(max(0.0, now - started))
        if max(lengths) > 1:
            self.per_token.observe(max(0.0, now - first) / (max(lengths) - 1))


def engine_families(
    prefix: str, model: str, stats: Mapping[int, EngineStats], up: Collection[int]
) -> Iterator[Family]:
    """Yield the state of ranks as prometheus_client's metrics; nothing runs on those that are not `up`."""
    gauges: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
        ("num_requests_running", "Requests that hold KV cache", lambda rank: rank.running),
        ("num_requests_waiting", "Requests in the queue", lambda rank: rank.waiting),
        ("kv_cache_usage_perc", "Share of KV cache blocks in use, 0 to 1", lambda rank: rank.kv_cache_usage),
    )
    counters = (
        ("num_preemptions", "Preempted requests", "preemptions"),
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", "prefix_queries"),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache", "prefix_hits"),
        ("spec_decode_num_drafts", "Times that a request's drafts were verified", "num_drafts"),
        ("spec_decode_num_draft_tokens", "Draft tokens verified", "num_draft_tokens"),
        ("spec_decode_num_accepted_tokens", "Draft tokens accepted", "num_accepted_tokens"),
    )
    known = dict(stats) or {0: EngineStats()}
    alive = GaugeMetricFamily(f"{prefix}engine_up", "1 while the rank is loaded and runs", labels=_LABELS)
    for rank in known:
        alive.add_metric([model, str(rank)], float(rank in up))
    yield alive
    for name, text, value in gauges:
        gauge = GaugeMetricFamily(f"{prefix}{name}", text, labels=_LABELS)
        for rank, state in known.items():
            gauge.add_metric([model, str(rank)], value(state) if rank in up else 0.0)
        yield gauge
    for name, text, field in counters:
        counter = CounterMetricFamily(f"{prefix}{name}", text, labels=_LABELS)
        for rank, state in known.items():
            counter.add_metric([model, str(rank)], getattr(state, field))
        yield counter
    steps = HistogramMetricFamily(f"{prefix}iteration_tokens_total", "Tokens that a step ran", labels=_LABELS)
    for rank, state in known.items():
        bounds = zip([*STEP_BOUNDS, math.inf], itertools.accumulate(state.step_buckets), strict=True)
        buckets = [(floatToGoString(bound), count) for bound, count in bounds]
        steps.add_metric([model, str(rank)], buckets, state.ran_tokens)
    yield steps


def _values(family: Family) -> Iterator[Metric]:
    if family.type != "histogram":
        kind = Counter if family.type == "counter" else Gauge
        for sample in family.samples:
            yield kind(sample.name, dict(sample.labels), sample.value)
        return
    series: dict[tuple[tuple[str, str], ...], Histogram] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        found = series.setdefault(tuple(labels.items()), Histogram(family.name, labels, 0, 0.0, {}))
        if "le" in sample.labels:
            found.buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_count"):
            found.count = int(sample.value)
        else:
            found.sum = sample.value
    yield from series.values()
