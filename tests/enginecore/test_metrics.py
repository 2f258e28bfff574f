"""Names and values of metrics, against those that vLLM documents."""

import re

import numpy as np
import pytest

from enginecore import EngineConfig
from enginecore.errors import ConfigError
from enginecore.frontend.output_processor import OutputProcessor
from enginecore.frontend.request import Prompt, Request
from enginecore.messages import AddRequest, EngineLimits, EngineStats, Outputs, RowSampling
from enginecore.metrics import Counter, Gauge, Histogram, Metrics
from enginecore.sampling_params import SamplingParams

VLLM = """
num_requests_running num_requests_waiting kv_cache_usage_perc num_preemptions_total prefix_cache_queries_total
prefix_cache_hits_total prompt_tokens_total generation_tokens_total request_success_total cache_config_info
iteration_tokens_total_bucket time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
request_time_per_output_token_seconds_bucket e2e_request_latency_seconds_bucket
request_queue_time_seconds_sum request_inference_time_seconds_sum request_prefill_time_seconds_sum
request_decode_time_seconds_sum request_prompt_tokens_bucket request_generation_tokens_bucket
request_max_num_generation_tokens_bucket request_params_n_count request_params_max_tokens_count
spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
"""
"""Series by which vLLM's Grafana dashboards draw, those that its metrics page lists for every model, and
those of speculative decoding."""

LIMITS = EngineLimits(64, 320, 8, 16, device="cpu", dtype="float32")


STATS = EngineStats(running=2, waiting=1, free_blocks=2, num_blocks=8, preemptions=2, ran_tokens=12)
STATS.step_buckets[0] = STATS.step_buckets[2] = 1
"""After two steps: one of a token, one of eleven."""


def loaded(prefix: str = "octavo_", stats: EngineStats | None = None) -> Metrics:
    metrics = Metrics("tiny", prefix, stats=lambda: {0: stats or EngineStats()})
    metrics.loaded(EngineConfig(model="models/tiny"), LIMITS)
    metrics.rank_up(0)
    return metrics


def added(processor: OutputProcessor, name: str, prompt: list[int], max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    sampling = RowSampling(params, [], [], seed=0)
    message = AddRequest(processor.new_number(), np.array(prompt, np.int32), max_tokens, sampling)
    processor.add(Request(name, Prompt(None, prompt), params), (), [message])


def run_one(metrics: Metrics) -> None:
    """Run a request of 3 prompt tokens, 2 of them cached, that generates 2, one a step."""
    processor = OutputProcessor(None)
    added(processor, "r", [1, 2, 3], 2)
    for step in range(2):
        outputs = Outputs(
            np.array([0]),
            np.array([5], np.int32),
            np.array([2 * step], np.int8),
            scheduled={} if step else {0: (2, 0.5)},
        )
        metrics.record(outputs, processor.process(outputs))


def test_vllms_names_with_its_prefix():
    series = set(re.findall(r"^(vllm:\w+){", loaded("vllm:").text().decode(), re.MULTILINE))
    assert {f"vllm:{name}" for name in VLLM.split()} - series == set()


def test_no_series_tells_when_it_was_made():
    text = loaded().text().decode()
    assert "_created" not in text
    assert "octavo_prompt_tokens_total{" in text


def test_the_process_the_build_the_model_and_its_cache():
    text = loaded().text().decode()
    for name in ("process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"):
        assert re.search(rf"^{name} \d", text, re.MULTILINE)
    assert re.search(r'^octavo_build_info{python="3\..*",version="\d.*"} 1.0$', text, re.MULTILINE)
    model = (
        'octavo_model_info{device="cpu",dtype="float32",max_model_len="64",model="models/tiny",'
        'model_name="tiny"} 1.0'
    )
    assert model in text
    [cache] = re.findall(r"^octavo_cache_config_info{(.*)} 1.0$", text, re.MULTILINE)
    for label in ('num_gpu_blocks="8"', 'block_size="16"', 'kv_cache_size_tokens="128"'):
        assert label in cache


def test_engine_up():
    metrics = Metrics("tiny")
    up = 'octavo_engine_up{engine="0",model_name="tiny"} '
    assert f"{up}0.0" in metrics.text().decode()
    metrics.loaded(EngineConfig(model="models/tiny"), LIMITS)
    metrics.rank_up(0)
    assert f"{up}1.0" in metrics.text().decode()
    metrics.rank_down(0)
    assert f"{up}0.0" in metrics.text().decode()
    metrics.rank_up(0)
    metrics.stopped()
    assert f"{up}0.0" in metrics.text().decode()


def test_what_runs_is_shown_of_ranks_that_are_up_and_what_was_counted_of_all():
    metrics = Metrics("tiny", stats=lambda: {0: STATS, 1: STATS}, ranks=(0, 1))
    metrics.rank_up(1)
    found = {(value.name, value.labels.get("engine")): value for value in metrics.values()}

    def shown(name: str) -> list[float]:
        return [found[f"octavo_{name}", rank].value for rank in "01"]

    assert shown("engine_up") == [0, 1]
    assert shown("num_requests_running") == [0, 2]
    assert shown("num_requests_waiting") == [0, 1]
    assert shown("kv_cache_usage_perc") == [0, 0.75]
    assert shown("num_preemptions_total") == [2, 2]


def test_values_are_plain_data():
    metrics = loaded("vllm:", STATS)
    run_one(metrics)
    found = {(value.name, value.labels.get("finished_reason")): value for value in metrics.values()}
    labels = {"model_name": "tiny", "engine": "0"}
    assert found["vllm:generation_tokens_total", None] == Counter("vllm:generation_tokens_total", labels, 2.0)
    assert found["vllm:num_requests_running", None] == Gauge("vllm:num_requests_running", labels, 2.0)
    assert found["vllm:request_success_total", "length"].value == 1.0
    assert found["vllm:request_success_total", "stop"].value == 0.0
    prompt = found["vllm:request_prompt_tokens", None]
    assert isinstance(prompt, Histogram)
    assert (prompt.labels, prompt.count, prompt.sum) == (labels, 1, 3.0)
    assert (prompt.buckets["1.0"], prompt.buckets["8.0"], prompt.buckets["+Inf"]) == (0, 1, 1)
    for name, count, total in (
        ("request_generation_tokens", 1, 2.0),
        ("request_params_max_tokens", 1, 2.0),
        ("request_queue_time_seconds", 1, 0.5),
        ("iteration_tokens_total", 2, 12.0),
    ):
        histogram = found[f"vllm:{name}", None]
        assert (histogram.count, histogram.sum) == (count, total)
    steps = found["vllm:iteration_tokens_total", None].buckets
    assert [steps[bound] for bound in ("1.0", "8.0", "16.0", "+Inf")] == [1, 1, 2, 2]
    for name in ("time_to_first_token", "inter_token_latency", "request_decode_time"):
        assert found[f"vllm:{name}_seconds", None].count == 1
    assert not any(name.startswith(("process_", "http_")) for name, _ in found)


def test_requests_that_run_together_count_one_by_one_between_tokens():
    metrics = loaded()
    processor = OutputProcessor(None)
    for index in range(3):
        added(processor, str(index), [1], 9)
    # The third request gets its first token a step later than the others.
    for numbers in ([0, 1], [0, 1, 2], [0, 1, 2]):
        many = len(numbers)
        outputs = Outputs(np.array(numbers), np.full(many, 5, np.int32), np.zeros(many, np.int8))
        metrics.record(outputs, processor.process(outputs))
    found = {value.name: value for value in metrics.values()}
    itl = found["octavo_inter_token_latency_seconds"]
    assert isinstance(itl, Histogram)
    assert (itl.count, itl.buckets["+Inf"]) == (5, 5)
    assert found["octavo_time_to_first_token_seconds"].count == 3
    series = 'octavo_inter_token_latency_seconds_bucket{engine="0",le="+Inf",model_name="tiny"} 5.0'
    assert series in metrics.text().decode()


@pytest.mark.parametrize(("value", "first"), [(0.01, "0.01"), (0.011, "0.02"), (1000.0, "+Inf")])
def test_a_value_between_tokens_counts_in_each_bucket_that_reaches_it(value, first):
    metrics = loaded()
    metrics.itl.labels("tiny", "0").observe(value, 2)
    [itl] = [entry for entry in metrics.values() if entry.name == "octavo_inter_token_latency_seconds"]
    assert isinstance(itl, Histogram)
    assert itl.sum == 2 * value
    names = list(itl.buckets)
    reached = names.index(first)
    assert list(itl.buckets.values()) == [0] * reached + [2] * (len(names) - reached)


def test_a_request_that_the_core_refuses_has_no_first_token():
    metrics = loaded()
    processor = OutputProcessor(None)
    added(processor, "r", [1, 2, 3], 2)
    refused = Outputs(
        np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int8), errors={0: "too long"}
    )
    metrics.record(refused, processor.process(refused))
    found = {(value.name, value.labels.get("finished_reason")): value for value in metrics.values()}
    assert found["octavo_request_success_total", "error"].value == 1
    assert found["octavo_time_to_first_token_seconds", None].count == 0
    assert found["octavo_inter_token_latency_seconds", None].count == 0


@pytest.mark.parametrize("prefix", ["", "1x", "a-b", "a b"])
def test_a_prefix_that_no_name_can_begin_with(prefix):
    with pytest.raises(ConfigError, match="metrics_prefix"):
        Metrics("tiny", prefix)
