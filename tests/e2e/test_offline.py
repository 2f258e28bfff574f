"""`octavo-offline` with a real engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import successor_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return successor_model.write(tmp_path_factory.mktemp("model") / "tiny")


def offline(model: Path, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "octavo-offline"), str(model), "--device", "cpu"]
    limits = ["--max-model-len", "256", "--num-blocks-override", "64"]
    return subprocess.run(
        [*command, *limits, *arguments], input=given, capture_output=True, text=True, timeout=120, check=False
    )


def test_prompts(model):
    done = offline(model, "--prompt", "q", "--prompt", "a", "--max-tokens", "9", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "==> prompt 1, answer 1 <==\n\N{HOT PEPPER}é语\n\n==> prompt 2, answer 1 <==\nbcSTOPzzz\n"
    )


def test_batch(model):
    chat = {"messages": [{"role": "user", "content": "a"}], "temperature": 0, "stop": "STOP"}
    text = {"prompt": ["q", "e"], "temperature": 0, "max_tokens": 4}
    long = {"prompt": "a", "max_tokens": 256}
    requests = [
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "text", "method": "POST", "url": "/v1/completions", "body": text},
        {"custom_id": "long", "method": "POST", "url": "/v1/completions", "body": long},
    ]
    given = "".join(json.dumps(request) + "\n" for request in requests)
    done = offline(model, "--input", "-", "--output", "-", "--served-model-name", "tiny", given=given)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "octavo-offline: 2 answered, 1 failed"
    answers = {answer["custom_id"]: answer for answer in map(json.loads, done.stdout.splitlines())}
    chat_body = answers["chat"]["response"]["body"]
    assert chat_body["choices"][0]["message"]["content"] == "bc"
    assert chat_body["choices"][0]["stop_reason"] == "STOP"
    assert chat_body["model"] == "tiny"
    text_body = answers["text"]["response"]["body"]
    assert [choice["text"] for choice in text_body["choices"]] == ["\N{HOT PEPPER}", ""]
    assert text_body["usage"]["completion_tokens"] == 5
    assert (
        "maximum context length is 256 tokens. However, your prompt is too long"
        in answers["long"]["error"]["message"]
    )


def test_an_error_is_one_line(model):
    done = offline(model, "--prompt", "a" * 300)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(
        "octavo-offline: This model's maximum context length is 256 tokens. However,"
    )
    assert "Traceback" not in done.stderr
