"""Batch files."""

import io
import json
from typing import Any, cast

import pytest
from stepping_engine import SteppingEngine

from octavo_offline.batch import run_batch


def line(custom_id: Any = "1", url: str = "/v1/completions", method: str = "POST", **body: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body}).encode() + b"\n"


def run(engine: SteppingEngine, *lines: bytes, names: tuple[str, ...] = ("tiny",)) -> dict[Any, Any]:
    """The answer lines by custom id."""
    out = io.BytesIO()
    counts = run_batch(cast(Any, engine), names, lines, out)
    answers = [json.loads(entry) for entry in out.getvalue().splitlines()]
    assert counts.answered == sum(answer["error"] is None for answer in answers)
    assert counts.failed == sum(answer["error"] is not None for answer in answers)
    return {answer["custom_id"]: answer for answer in answers}


def test_a_completion(engine):
    answer = run(engine, line("a-1", prompt="hi"))["a-1"]
    assert list(answer) == ["id", "custom_id", "response", "error"]
    assert answer["id"].startswith("batch_req_")
    response = answer["response"]
    body = response["body"]
    assert (response["status_code"], response["request_id"]) == (200, body["id"])
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    assert body["choices"] == [
        {"index": 0, "text": "hi", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (2, 3)


def test_a_chat(engine):
    messages = [{"role": "user", "content": "hi"}]
    answer = run(engine, line(url="/v1/chat/completions", messages=messages, model="tiny", max_tokens=6))["1"]
    body = answer["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"] == "user:h"
    assert body["choices"][0]["finish_reason"] == "length"


def test_prompts_n_echo_and_logprobs(engine):
    body = run(engine, line(prompt=[[97], [98]], n=2, echo=True))["1"]["response"]["body"]
    assert [choice["text"] for choice in body["choices"]] == ["aa", "aa", "bb", "bb"]
    body = run(engine, line(prompt="a", logprobs=0))["1"]["response"]["body"]
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [-0.5, -0.5]


def test_a_bad_line_hurts_no_other(engine):
    bad = line("bad", prompt="a", temperature=-1)
    answers = run(engine, line("good", prompt="a"), bad, line("too", prompt="b"))
    assert [answers[name]["response"]["status_code"] for name in ("good", "bad", "too")] == [200, 400, 200]
    answer = answers["bad"]
    assert answer["response"]["body"]["error"]["param"] == "temperature"
    assert answer["error"]["code"] == "invalid_request_error"
    assert answer["error"]["message"] == answer["response"]["body"]["error"]["message"]


@pytest.mark.parametrize(
    "bad, said",
    [
        (line(method="GET", prompt="a"), "method must be POST"),
        (line(url="/v1/embeddings", prompt="a"), "url must be /v1/completions or /v1/chat/completions"),
        (line(prompt=""), "the prompt is empty"),
        (line(prompt="a" * 64), "64 tokens"),
        (line(prompt=5), "prompt must be"),
        (line(), "prompt is empty"),
        (line(prompt="a", stream=True), "cannot stream"),
        (line(prompt="a", best_of=3), "best_of"),
        (line(url="/v1/chat/completions", messages=[]), "messages is empty"),
        (line(url="/v1/chat/completions", messages=[{"role": "user", "content": "a"}], tools=[{}]), "tools"),
        (b'{"custom_id": "1"}', "missing required field"),
        (b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": 5}', "Expected `object`"),
    ],
)
def test_lines_that_cannot_be_run(engine, bad, said):
    answer = run(engine, bad)["1"]
    assert said in answer["error"]["message"]
    assert answer["response"]["status_code"] == 400


def test_lines_without_a_usable_custom_id(engine):
    for bad in (b"nonsense", b"[]", b"\xff", b'{"custom_id": "1\xff"}'):
        assert run(engine, bad)[None]["response"]["status_code"] == 400
    assert "custom_id" in run(engine, line(5, prompt="a"))[5]["error"]["message"]


def test_blank_lines_are_passed_over(engine):
    assert list(run(engine, b"\n", line(prompt="a"), b"  \n")) == ["1"]


def test_names_of_the_model(engine):
    for model in ("x", "y", None):
        answers = run(engine, line(prompt="a", model=model), names=("x", "y"))
        assert answers["1"]["response"]["body"]["model"] == (model or "x")
    answer = run(engine, line(prompt="a", model="z", temperature=-1))["1"]
    assert answer["response"]["status_code"] == 404
    assert answer["error"]["code"] == "invalid_request_error"


def test_every_line_is_answered_with_more_lines_than_fit_at_once(engine):
    answers = run(engine, *[line(str(number), prompt=f"{number}") for number in range(50)])
    assert [answers[str(number)]["response"]["body"]["choices"][0]["text"] for number in range(50)] == [
        str(number) for number in range(50)
    ]


def test_priority_and_cache_salt(engine):
    run(engine, line(prompt="a", priority=2, cache_salt="s"))
    assert (engine.requests[0].priority, engine.requests[0].prompt.cache_salt) == (2, "s")
