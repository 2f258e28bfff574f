"""Batch files."""

import io
import json
from typing import Any, cast

import pytest
from stepping_engine import SteppingEngine

from enginecore.errors import RequestError
from enginecore.frontend.parsing import REASONING_PARSERS, Parsers, Thinking
from octavo_offline.answer_file import OutputError
from octavo_offline.batch import FAILURES_KEPT, Counts, run_batch
from octavo_offline.batch_input import numbered


def line(custom_id: Any = "1", url: str = "/v1/completions", method: str = "POST", **body: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body}).encode() + b"\n"


class Refusing(io.BytesIO):
    """A file that takes some lines and then no more."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.left = most

    def write(self, line: Any) -> int:
        if self.left == 0:
            raise OutputError("out.jsonl: No space left on device")
        self.left -= 1
        return super().write(line)


def run(engine: SteppingEngine, *lines: bytes, names: tuple[str, ...] = ("tiny",)) -> dict[Any, Any]:
    """The answer lines by custom id."""
    out = io.BytesIO()
    counts = Counts()
    run_batch(cast(Any, engine), names, numbered(io.BytesIO(b"".join(lines))), out, counts)
    answers = [json.loads(entry) for entry in out.getvalue().splitlines()]
    for answer in answers:
        assert (answer["response"] is None) != (answer["error"] is None)
    good = [answer for answer in answers if answer["response"] and answer["response"]["status_code"] == 200]
    assert (counts.answered, counts.failed) == (len(good), len(answers) - len(good))
    return {answer["custom_id"]: answer for answer in answers}


def message(answer: dict[str, Any]) -> str:
    """Why a request was not run."""
    return (answer["error"] or answer["response"]["body"]["error"])["message"]


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
    assert answers["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert answers["bad"]["error"] is None
    assert answers["bad"]["response"]["body"]["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "bad, said",
    [
        (line(prompt=""), "the prompt is empty"),
        (line(prompt="a" * 64), "64 tokens"),
        (line(prompt=5), "prompt must be"),
        (line(), "prompt is empty"),
        (line(prompt="a", stream=True), "cannot stream"),
        (line(prompt="a", best_of=3), "best_of"),
        (line(url="/v1/chat/completions", messages=[]), "messages is empty"),
        (line(url="/v1/chat/completions", messages=[{"role": "user", "content": "a"}], tools=[{}]), "tools"),
    ],
)
def test_a_request_that_the_server_would_refuse_has_its_response(engine, bad, said):
    answer = run(engine, bad)["1"]
    assert said in message(answer)
    assert (answer["response"]["status_code"], answer["error"]) == (400, None)


CHAT = {"url": "/v1/chat/completions", "messages": [{"role": "user", "content": "a"}]}


def test_forms_leave_room_for_reasoning(engine):
    engine.frontend.parsers = Parsers(None, REASONING_PARSERS["deepseek_r1"])
    run(engine, line(**CHAT, response_format={"type": "json_object"}), line("2", prompt="a"))
    thinking = Thinking("<think>", "</think>", begun=True)
    assert {request.prompt.text: request.thinking for request in engine.requests} == {
        "user:a": thinking,
        "a": None,
    }


@pytest.mark.parametrize(
    "bad, param, said",
    [
        ({"guided_regex": "(", "prompt": "a"}, "guided_regex", "guided_regex: regex: "),
        ({**CHAT, "structured_outputs": {"regex": "("}}, "structured_outputs", "structured_outputs: regex: "),
        (
            {**CHAT, "response_format": {"type": "json_object"}},
            "response_format",
            "response_format: json_obj",
        ),
        ({**CHAT, "messages": [{"role": "user", "content": "a" * 64}]}, "messages", "tokens of at most 63"),
    ],
)
def test_what_the_engine_refuses_is_called_as_the_body_calls_it(engine, bad, param, said):
    def add(request):
        wanted = request.params.structured_outputs
        if wanted is not None:
            message = f"structured_outputs: {wanted.kind}: it does not compile"
            raise RequestError(message, "structured_outputs")
        SteppingEngine.add(engine, request)

    engine.add = add
    error = run(engine, line(**bad))["1"]["response"]["body"]["error"]
    assert error["param"] == param
    assert said in error["message"]


@pytest.mark.parametrize(
    "bad, custom_id, said",
    [
        (line(method="GET", prompt="a"), "1", "method must be POST"),
        (line(url="/v1/embeddings", prompt="a"), "1", "url must be /v1/completions or /v1/chat/completions"),
        (b'{"custom_id": "1"}', "1", "missing required field"),
        (
            b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": 5}',
            "1",
            "Expected `object`",
        ),
        (line(5, prompt="a"), 5, "custom_id"),
        (b"nonsense", None, "the line is not valid JSON"),
        (b"[]", None, "Expected `object`"),
        (b"\xff", None, "the line is not valid JSON"),
        (b'{"custom_id": "1\xff"}', None, ""),
    ],
)
def test_a_line_that_is_no_request_is_named_by_its_number(engine, bad, custom_id, said):
    answer = run(engine, line("fine", prompt="a"), b"\n", bad)[custom_id]
    assert said in answer["error"]["message"]
    assert (answer["error"]["line"], answer["response"]) == (3, None)


def test_failures_are_told_by_line_up_to_a_number(engine):
    lines = [line("fine", prompt="a"), *[line(str(number), prompt="") for number in range(FAILURES_KEPT + 5)]]
    counts = Counts()
    run_batch(cast(Any, engine), ("tiny",), numbered(io.BytesIO(b"".join(lines))), io.BytesIO(), counts)
    assert (counts.answered, counts.failed) == (1, FAILURES_KEPT + 5)
    assert counts.failures[0] == "line 2: the prompt is empty"
    assert len(counts.failures) == FAILURES_KEPT


def test_what_could_not_be_written_is_not_counted(engine):
    lines = b"".join(line(str(number), prompt="a") for number in range(4))
    counts = Counts()
    with pytest.raises(OutputError, match="No space left"):
        run_batch(cast(Any, engine), ("tiny",), numbered(io.BytesIO(lines)), Refusing(3), counts)
    assert counts.written == 3


def test_blank_lines_are_passed_over(engine):
    assert list(run(engine, b"\n", line(prompt="a"), b"  \n")) == ["1"]


def test_names_of_the_model(engine):
    for model in ("x", "y", None):
        answers = run(engine, line(prompt="a", model=model), names=("x", "y"))
        assert answers["1"]["response"]["body"]["model"] == (model or "x")
    answer = run(engine, line(prompt="a", model="z", temperature=-1))["1"]
    assert answer["response"]["status_code"] == 404
    assert answer["response"]["body"]["error"]["code"] == "model_not_found"


def test_every_line_is_answered_with_more_lines_than_fit_at_once(engine):
    answers = run(engine, *[line(str(number), prompt=f"{number}") for number in range(50)])
    assert [answers[str(number)]["response"]["body"]["choices"][0]["text"] for number in range(50)] == [
        str(number) for number in range(50)
    ]


def test_priority_and_cache_salt(engine):
    run(engine, line(prompt="a", priority=2, cache_salt="s"))
    assert (engine.requests[0].priority, engine.requests[0].prompt.cache_salt) == (2, "s")
