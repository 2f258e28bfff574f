"""The load generator: what it sends, and what it makes of answers."""

import asyncio
import json
import random
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

import serve
from data_files import AZURE_CONVERSATION, MOONCAKE_CONVERSATION
from serve import Answered, Planned


def options(*arguments: str):
    return serve.parser().parse_args(["http://server", *arguments])


def test_poisson_arrivals_have_the_rate_and_the_lengths_asked_for():
    planned = serve.plan(options("--requests", "4000", "--rate", "5", "--prompt", "10:20", "--output", "7"))
    assert planned[-1].at == pytest.approx(800, rel=0.1)
    gaps = [later.at - sooner.at for sooner, later in pairwise(planned)]
    # An exponential distribution's deviation is its mean.
    assert sum((gap - 0.2) ** 2 for gap in gaps) / len(gaps) == pytest.approx(0.04, rel=0.2)
    assert {each.prompt_tokens for each in planned} == set(range(10, 21))
    assert {each.output_tokens for each in planned} == {7}


def test_a_burst_arrives_at_once():
    assert {each.at for each in serve.plan(options("--arrivals", "burst", "--requests", "5"))} == {0.0}


def test_traces_keep_times_and_lengths():
    azure = serve.read_trace(AZURE_CONVERSATION, 2, 2.0)
    assert azure == [Planned(0.0, 374, 44), Planned(pytest.approx((50.995169 - 46.68059) / 2), 396, 109)]
    mooncake = serve.read_trace(MOONCAKE_CONVERSATION, 2, 1.0)
    assert [each.prompt_tokens for each in mooncake] == [6758, 7322]
    first, second = (serve.make_prompt(each, random.Random(0), ids=True) for each in mooncake)
    assert (len(first), len(second)) == (6758, 7322)
    # They share the first block of 512 tokens and no more.
    assert first[:512] == second[:512]
    assert first[512:520] != second[512:520]
    assert len(serve.make_prompt(mooncake[0], random.Random(0), ids=False).split()) == 6758
    with pytest.raises(ValueError, match="is no trace"):
        serve.read_trace(Path(__file__), 1, 1.0)


def test_figures_of_answers():
    fast = Answered(sent=1.0, pieces=[1.1, 1.2, 1.4], ended=1.5, prompt_tokens=3, output_tokens=4)
    slow = Answered(sent=1.0, pieces=[2.0, 3.0], ended=3.0, prompt_tokens=5, output_tokens=2)
    failed = Answered(sent=1.0, error="429 full")
    report = serve.summary([fast, slow, failed], {"ttft": 500.0, "tpot": 100.1})
    assert (report["requests"], report["failed"], report["errors"]) == (3, 1, ["429 full"])
    assert report["seconds"] == 2.0
    assert report["output_tokens_per_s"] == 3.0
    assert report["goodput_per_s"] == 0.5
    assert report["ttft_ms"]["p50"] == pytest.approx(550)
    assert report["tpot_ms"]["mean"] == pytest.approx((100 + 1000) / 2)
    assert report["itl_ms"]["mean"] == pytest.approx((100 + 200 + 1000) / 3)
    assert report["e2e_ms"]["p99"] == pytest.approx(500 + 1500 * 0.99)
    shown = serve.table(report)
    assert "3 requests, 1 failed" in shown
    assert "goodput 0.50 requests/s (ttft ≤ 500 ms, tpot ≤ 100.1 ms)" in shown
    assert serve.summary([failed], {}) == {
        "requests": 1,
        "failed": 1,
        "errors": ["429 full"],
    }


@pytest.mark.parametrize("chat", [False, True])
def test_it_reads_streams(chat, monkeypatch):
    bodies = []

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        assert request.headers["authorization"] == "Bearer k"
        bodies.append(json.loads(request.content))
        if len(bodies) == 3:
            return httpx.Response(429, json={"error": {"message": "full"}})
        piece = {"delta": {"content": "a"}} if chat else {"text": "a"}
        events = [{"choices": [piece]}, {"choices": [piece]}, {"choices": [], "usage": {"prompt_tokens": 4}}]
        events[-1]["usage"]["completion_tokens"] = 9
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return httpx.Response(200, text="".join([": waiting\n\n", *lines, "data: [DONE]\n\n"]))

    real = httpx.AsyncClient
    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(httpx, "AsyncClient", lambda **given: real(transport=transport, **given))
    flags = ["--arrivals", "burst", "--requests", "3", "--key", "k", "--extra", '{"ignore_eos": true}']
    given = options(*flags, *(["--chat"] if chat else []))
    answers = asyncio.run(serve.run(given, serve.plan(given)))
    assert [len(each.pieces) for each in answers] == [2, 2, 0]
    assert answers[0].prompt_tokens == 4
    assert answers[0].output_tokens == 9
    assert "429" in answers[2].error
    assert all(body["ignore_eos"] and body["model"] == "m" and body["max_tokens"] == 64 for body in bodies)
    assert ("messages" in bodies[0]) is chat


def test_a_stream_with_an_error_has_failed():
    answer = Answered(0.0)
    serve._read_line('data: {"error": {"message": "dead"}}', answer)
    assert "dead" in answer.error


@pytest.mark.parametrize(
    "flags", [["--prompt", "5:2"], ["--rate", "0"], ["--goal", "itl=5"], ["--requests", "-1"]]
)
def test_wrong_usage(flags, capsys):
    with pytest.raises(SystemExit):
        options(*flags)
    assert flags[0] in capsys.readouterr().err
