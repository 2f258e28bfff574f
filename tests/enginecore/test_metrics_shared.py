"""Metrics of several processes that count together: HC-137."""

import os
import re
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys
import numpy as np
from enginecore.frontend.output_processor import OutputProcessor
from enginecore.frontend.request import Prompt, Request
from enginecore.messages import AddRequest, EngineStats, Outputs, RowSampling
from enginecore.metrics import Metrics
from enginecore.sampling_params import SamplingParams

rank = int(sys.argv[1])
stats = {0: EngineStats(running=2, preemptions=7), 1: EngineStats(running=1)}
metrics = Metrics("tiny", stats=lambda: stats, ranks=(0, 1), folder=os.environ["PROMETHEUS_MULTIPROC_DIR"])
for one in stats:
    metrics.rank_up(one)
processor = OutputProcessor(None)
number = 0
for line in sys.stdin:
    match line.split():
        case ["run", count]:
            for _ in range(int(count)):
                params = SamplingParams(max_tokens=1)
                sampling = RowSampling(params, [], [], seed=0)
                message = AddRequest(processor.new_number(), np.array([1], np.int32), 1, sampling)
                processor.add(Request(str(number), Prompt(None, [1]), params), (), [message])
                outputs = Outputs(np.array([message.number]), np.array([5], np.int32), np.array([2], np.int8))
                metrics.record(outputs, processor.process(outputs), rank)
                number += 1
                metrics.answered("POST", "/v1/completions", 200)
        case ["enter"]:
            metrics.in_progress.inc()
        case ["die"]:
            os.kill(os.getpid(), signal.SIGKILL)
    print(metrics.text().decode(), "END", metrics.num_in_progress(), flush=True)
"""


class Process:
    def __init__(self, folder, rank):
        self._process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank)],
            env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self.in_progress = 0

    def tell(self, line: str) -> dict[str, float]:
        """Give an order and return the series that are shown then."""
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        found: dict[str, float] = {}
        for text in self._process.stdout:
            if "END" in text:
                self.in_progress = int(text.split()[-1])
                break
            if not text.startswith("#"):
                series, value = text.rsplit(" ", 1)
                assert series not in found, "a series stands twice"
                found[series] = float(value)
        return found

    def end(self):
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def processes(tmp_path):
    found = [Process(tmp_path, rank) for rank in range(2)]
    yield found
    for process in found:
        process.end()


def counted(series: dict[str, float]) -> tuple[float, ...]:
    """Return requests of each rank, first tokens and all tokens of each, and HTTP requests."""
    success = 'octavo_request_success_total{{engine="{}",finished_reason="length",model_name="tiny"}}'
    ttft = 'octavo_time_to_first_token_seconds_count{{engine="{}",model_name="tiny"}}'
    tokens = 'octavo_generation_tokens_total{{engine="{}",model_name="tiny"}}'
    ranks = [series[name.format(rank)] for name in (success, ttft, tokens) for rank in range(2)]
    http = 'http_requests_total{handler="/v1/completions",method="POST",status="200"}'
    return (*ranks, series[http])


def test_counts_are_right_whichever_process_answers_and_survive_its_death(processes, tmp_path):
    first, second = processes
    first.tell("run 3")
    second.tell("run 5")
    for process in (first, second, first):
        shown = process.tell("show")
        assert counted(shown) == (3, 5, 3, 5, 3, 5, 8)
        # What ranks count stands once, not once a process.
        assert shown['octavo_num_preemptions_total{engine="0",model_name="tiny"}'] == 7
        assert shown['octavo_num_requests_running{engine="1",model_name="tiny"}'] == 1
        assert not any(re.search(r"\bpid=", series) for series in shown)
    assert second.tell("die") == {}
    assert counted(first.tell("run 1")) == (4, 5, 4, 5, 4, 5, 9)
    third = Process(tmp_path, 1)
    try:
        assert counted(third.tell("run 2")) == (4, 7, 4, 7, 4, 7, 11)
    finally:
        third.end()


def test_requests_in_progress_are_those_of_all_processes_that_live(processes, tmp_path):
    first, second = processes
    for process in (first, second, second):
        process.tell("enter")
    assert first.tell("show")["http_requests_in_progress"] == 3
    assert first.in_progress == 3
    second.tell("die")
    # As the supervisor does for a process that has ended.
    for path in tmp_path.glob(f"gauge_live*_{second.pid}.db"):
        path.unlink()
    assert first.tell("show")["http_requests_in_progress"] == 1
    assert first.in_progress == 1
