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
"""
"""Series by which vLLM's Grafana dashboards draw, and those that its metrics page lists for every model."""

LIMITS = EngineLimits(64, 320, 8, 16, device="cpu", dtype="float32")


def loaded(prefix: str = "octavo_") -> Metrics:
    metrics = Metrics("tiny", prefix)
    metrics.loaded(EngineConfig(model="models/tiny"), LIMITS)
    return metrics


def run_one(metrics: Metrics) -> None:
    """Run a request of 3 prompt tokens, 2 of them cached, that generates 2, one a step."""
    processor = OutputProcessor(None)
    params = SamplingParams(max_tokens=2)
    message = AddRequest(
        processor.new_number(), np.array([1, 2, 3], np.int32), 2, RowSampling(params, [], [], seed=0)
    )
    processor.add(Request("r", Prompt(None, [1, 2, 3]), params), (), [message])
    for step in range(2):
        outputs = Outputs(
            np.array([0]),
            np.array([5], np.int32),
            np.array([2 * step], np.int8),
            scheduled={} if step else {0: (2, 0.5)},
            stats=EngineStats(running=1 - step, prompt_tokens=3, generation_tokens=step + 1, step_tokens=3),
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
    assert f"{up}1.0" in metrics.text().decode()
    metrics.stopped()
    assert f"{up}0.0" in metrics.text().decode()


def test_values_are_plain_data():
    metrics = loaded("vllm:")
    run_one(metrics)
    found = {(value.name, value.labels.get("finished_reason")): value for value in metrics.values()}
    labels = {"model_name": "tiny", "engine": "0"}
    assert found["vllm:generation_tokens_total", None] == Counter("vllm:generation_tokens_total", labels, 2.0)
    assert found["vllm:num_requests_running", None] == Gauge("vllm:num_requests_running", labels, 0.0)
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
        ("iteration_tokens_total", 2, 6.0),
    ):
        histogram = found[f"vllm:{name}", None]
        assert (histogram.count, histogram.sum) == (count, total)
    for name in ("time_to_first_token", "inter_token_latency", "request_decode_time"):
        assert found[f"vllm:{name}_seconds", None].count == 1
    assert not any(name.startswith(("process_", "http_")) for name, _ in found)


def test_requests_that_run_together_count_one_by_one_between_tokens():
    metrics = loaded()
    processor = OutputProcessor(None)
    for index in range(3):
        processor.add(Request(str(index), Prompt(None, [1]), SamplingParams(max_tokens=9)), ())
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
    metrics.itl.observe(value, 2)
    [itl] = [entry for entry in metrics.values() if entry.name == "octavo_inter_token_latency_seconds"]
    assert isinstance(itl, Histogram)
    assert itl.sum == 2 * value
    names = list(itl.buckets)
    reached = names.index(first)
    assert list(itl.buckets.values()) == [0] * reached + [2] * (len(names) - reached)


def test_a_request_that_the_core_refuses_has_no_first_token():
    metrics = loaded()
    processor = OutputProcessor(None)
    processor.add(Request("r", Prompt(None, [1, 2, 3]), SamplingParams(max_tokens=2)), ())
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
