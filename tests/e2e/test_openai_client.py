"""OpenAI's own client against a real server process with a real engine."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

import successor_model
from server_process import LIMIT_S, Server, wait_until

PEPPER = "\N{HOT PEPPER}é语"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return successor_model.write(tmp_path_factory.mktemp("model") / "tiny")


FLAGS = ("--device", "cpu", "--max-model-len", "2048", "--num-blocks-override", "512", "--max-num-seqs", "4")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    started = Server(model, *FLAGS, "--served-model-name", "tiny", "alias")
    yield started
    started.stop()


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client


def test_models(client):
    assert [(card.id, card.max_model_len) for card in client.models.list()] == [
        ("tiny", 2048),
        ("alias", 2048),
    ]
    assert client.models.retrieve("alias").id == "alias"


def test_a_stream_says_what_the_whole_answer_says(client):
    ask = {"model": "tiny", "prompt": "qqq", "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**ask)
    chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    texts = [choice.text for chunk in chunks for choice in chunk.choices]
    assert whole.choices[0].text == "".join(texts) == PEPPER
    assert not any("\N{REPLACEMENT CHARACTER}" in text for text in texts)
    assert whole.choices[0].finish_reason == "stop"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 10)
    assert chunks[-1].usage.completion_tokens == 10


def test_bytes_that_are_no_character(client):
    ask = {"model": "tiny", "temperature": 0}
    assert client.completions.create(**ask, prompt="u").choices[0].text == "\N{REPLACEMENT CHARACTER}v"
    cut = client.completions.create(**ask, prompt="q", max_tokens=2)
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage.completion_tokens == 2
    streamed = client.completions.create(**ask, prompt="q", max_tokens=2, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == cut.choices[0].text


@pytest.mark.parametrize("stop", [["STOP"], ["zzz", "STOP"]])
def test_stop_strings(server, client, stop):
    ask = {"model": "tiny", "prompt": "a", "max_tokens": 500, "temperature": 0, "stop": stop}
    whole = client.completions.create(**ask)
    chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    texts = [choice.text for chunk in chunks for choice in chunk.choices]
    assert whole.choices[0].text == "".join(texts) == "bc"
    assert whole.choices[0].stop_reason == "STOP"
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == 6
    shown = client.completions.create(**ask, extra_body={"include_stop_str_in_output": True})
    assert shown.choices[0].text == "bcSTOP"
    server.wait_until_idle()


def test_chat(client):
    ask = {"model": "alias", "messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 2}
    answer = client.chat.completions.create(**ask, temperature=0)
    assert (answer.model, answer.choices[0].message.role) == ("alias", "assistant")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("bc", "length")
    chunks = list(client.chat.completions.create(**ask, temperature=0, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "bc"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"


def test_an_empty_answer(client):
    messages = [{"role": "user", "content": "e"}]
    whole = client.chat.completions.create(model="tiny", messages=messages, temperature=0)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("", "stop")
    chunks = list(client.chat.completions.create(model="tiny", messages=messages, temperature=0, stream=True))
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, "stop"]


def test_logprobs(client):
    ask = {"model": "tiny", "temperature": 0}
    chosen = client.completions.create(**ask, prompt="a", max_tokens=2, logprobs=2).choices[0].logprobs
    assert (chosen.tokens, chosen.text_offset) == (["b", "c"], [0, 1])
    assert [len(top) for top in chosen.top_logprobs] == [2, 2]
    assert all(-1e-3 < value < 0 for value in chosen.token_logprobs)
    answer = client.chat.completions.create(
        **ask, messages=[{"role": "user", "content": "q"}], logprobs=True, top_logprobs=1, max_tokens=4
    )
    entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries) == "\N{HOT PEPPER}".encode()
    assert [len(entry.top_logprobs) for entry in entries] == [1, 1, 1, 1]


def test_logprobs_of_tokens_that_are_parts_of_characters(client):
    """HC-94: candidates share the text U+FFFD, and several tokens are one character."""
    asking = {"model": "tiny", "prompt": "qqqq", "max_tokens": 40, "temperature": 0, "logprobs": 5}
    whole = client.completions.create(**asking).choices[0]
    assert whole.text == "\N{HOT PEPPER}é语"
    assert whole.logprobs.text_offset == [0, 0, 0, 0, 1, 1, 2, 2, 2, 3]
    scores = zip(
        whole.logprobs.tokens, whole.logprobs.token_logprobs, whole.logprobs.top_logprobs, strict=True
    )
    for token, score, candidates in scores:
        assert candidates[token] == score == max(candidates.values())
    chunks = [chunk.choices[0].logprobs for chunk in client.completions.create(**asking, stream=True)]
    streamed = [chunk for chunk in chunks if chunk is not None]
    assert [place for chunk in streamed for place in chunk.text_offset] == whole.logprobs.text_offset
    assert [entry for chunk in streamed for entry in chunk.top_logprobs] == whole.logprobs.top_logprobs


def test_scoring_a_prompt(client):
    answer = client.completions.create(model="tiny", prompt="abz", max_tokens=0, echo=True, logprobs=0)
    assert answer.choices[0].text == "abz"
    first, likely, unlikely = answer.choices[0].logprobs.token_logprobs
    assert first is None
    assert likely > -1e-3
    assert unlikely < -10
    assert answer.usage.completion_tokens == 0


def test_prompts_times_n(client):
    answer = client.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=1, seed=1)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "b"),
        (1, "b"),
        (2, "c"),
        (3, "c"),
    ]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 4)
    more = client.completions.create(model="tiny", prompt="a", n=6, max_tokens=3, seed=1)
    assert [choice.text for choice in more.choices] == ["bcS"] * 6


def test_cached_tokens_are_told(client):
    ask = {"model": "tiny", "prompt": "cached prompt " * 8 + "a", "max_tokens": 1, "temperature": 0}
    client.completions.create(**ask)
    again = client.completions.create(**ask)
    assert again.usage.prompt_tokens == 113
    assert again.usage.prompt_tokens_details.cached_tokens == 112
    assert again.choices[0].text == "b"


def test_the_log_tells_at_start_what_runs_and_why_the_cache_has_its_size(server):
    log = "\n".join(server.lines)
    stamp = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO"
    for pattern in (
        r"octavo_serve\.supervisor: version \d+\.\d+",
        r"enginecore\.worker\.worker: \S+/tiny on cpu in float32, (cpu|torch) kernels, threads: \d+$",
        r"enginecore\.worker\.worker: KV cache: 8192 tokens in 512 blocks of 16 in float32; asked for by ",
        r"octavo_serve\.server: ready on http://\S+: tiny, alias, at most 2048 tokens a request$",
    ):
        assert re.search(f"{stamp} {pattern}", log, re.MULTILINE), log


def test_metrics_and_log_count_the_same_requests(server, client):
    def requests() -> list[str]:
        return [line for line in server.lines if "id=cmpl-counted" in line]

    before = server.gauge("request_success_total", finished_reason="length")
    for _ in range(3):
        client.completions.create(
            model="tiny", prompt="qq", max_tokens=2, extra_headers={"x-request-id": "counted"}
        )
    assert server.gauge("request_success_total", finished_reason="length") == before + 3
    wait_until(lambda: len(requests()) == 3)
    form = (
        "status=200 id=cmpl-counted prompt_tokens=2 output_tokens=2 cached_tokens=0 "
        r"ttft=\d+\.\d{3} finish=length total=\d+\.\d{3}$"
    )
    assert all(re.search(form, line) for line in requests())


def test_the_http_process_has_no_torch(server):
    assert "torch" not in Path(f"/proc/{server.process.pid}/maps").read_text()


def test_errors(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert missing.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.completions.create(model="tiny", prompt="a", temperature=-1, stream=True)
    assert bad.value.param == "temperature"
    for ids in ([[-1]], [[320]], [[2**63]]):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="tiny", prompt=ids)
    assert client.completions.create(model="tiny", prompt=[319], max_tokens=1).choices[0].text == "z"


TOO_LONG = [
    ("completions", {"prompt": "a" * 2048}, "2048 tokens", "prompt"),
    ("completions", {"prompt": [97] * 2048}, "2048 tokens", "prompt"),
    ("completions", {"prompt": "a" * 10**6}, "1000000 characters", "prompt"),
    ("completions", {"prompt": "a", "max_tokens": 2048}, "2049 tokens", "max_tokens"),
    ("chat", {"content": "a" * 2048}, "tokens", "messages"),
    ("chat", {"content": "a" * 10**6}, "characters", "messages"),
    ("chat", {"content": "a", "min_tokens": 2048}, "min_tokens=2048", "min_tokens"),
    ("chat", {"content": "a", "max_tokens": 2048}, "tokens", "max_tokens"),
    ("chat", {"content": "a", "max_completion_tokens": 2048}, "tokens", "max_completion_tokens"),
]
"""Route, body, what the message counts, and the field at fault, for each check of a request's length."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("route", "body", "counted", "param"), TOO_LONG)
def test_whichever_check_finds_a_request_too_long_says_so_in_openais_words(
    client, route, body, counted, param, stream
):
    body = {"model": "tiny", "stream": stream, **body}
    if route == "chat":
        body["messages"] = [{"role": "user", "content": body.pop("content")}]
    extra = {name: body.pop(name) for name in ("min_tokens", "max_completion_tokens") if name in body}
    create = client.chat.completions.create if route == "chat" else client.completions.create
    with pytest.raises(openai.BadRequestError) as refused:
        create(**body, extra_body=extra)
    error = refused.value.body
    assert error["message"].startswith(
        "This model's maximum context length is 2048 tokens. However, your prompt is too long: "
    )
    assert counted in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert error["param"] == param


def test_leaving_frees_everything(server, client):
    ask = {"model": "tiny", "prompt": "z", "max_tokens": 2000, "extra_body": {"ignore_eos": True}}
    streams = [client.completions.create(**ask, stream=True) for _ in range(3)]
    for stream in streams:
        next(iter(stream))
    with pytest.raises(openai.APITimeoutError):
        # So short that no machine generates thousands of tokens within it.
        client.with_options(timeout=0.1).completions.create(**ask, n=4)
    for stream in streams:
        stream.close()
    server.wait_until_idle()
    assert client.completions.create(model="tiny", prompt="a", max_tokens=1).choices[0].text == "b"


@pytest.mark.slow
def test_draining(model):
    server = Server(model, *FLAGS, "--shutdown-timeout", "60")
    children = psutil.Process(server.process.pid).children(recursive=True)
    try:
        ask = {"model": str(model), "prompt": "z", "temperature": 0}
        stream = server.client.completions.create(**ask, max_tokens=200, stream=True)
        first = next(iter(stream))
        server.process.send_signal(signal.SIGTERM)
        rest = list(stream)
        assert (first.choices[0].text + "".join(chunk.choices[0].text for chunk in rest)) == "z" * 200
        assert rest[-1].choices[0].finish_reason == "length"
        assert server.process.wait(LIMIT_S) == 0
        assert psutil.wait_procs(children, timeout=LIMIT_S)[1] == []
    finally:
        server.stop()


@pytest.mark.slow
def test_a_killed_engine_ends_everything(model):
    """Where it may not be started again."""
    server = Server(model, *FLAGS, "--max-rank-restarts", "0")
    children = psutil.Process(server.process.pid).children(recursive=True)
    try:
        ask = {"model": str(model), "prompt": "z", "temperature": 0}
        stream = server.client.completions.create(**ask, max_tokens=2000, stream=True)
        next(iter(stream))
        [engine] = [child for child in children if "enginecore.core.process" in child.cmdline()]
        engine.kill()
        with pytest.raises(openai.APIError, match="killed by signal 9"):
            list(stream)
        assert server.process.wait(LIMIT_S) == 1
        server.stop()
        assert "octavo_serve.server: ending with exit status 1: " in "\n".join(server.lines)
    finally:
        server.stop()


@pytest.mark.slow
def test_a_killed_server_leaves_no_engine(model):
    server = Server(model, *FLAGS)
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert children
    server.stop()
    assert psutil.wait_procs(children, timeout=LIMIT_S)[1] == []


def test_a_model_that_is_not_there(tmp_path):
    command = [str(Path(sys.executable).parent / "octavo-serve"), str(tmp_path / "none"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("octavo-serve: there is no folder or .gguf file")
    assert "Traceback" not in done.stderr
