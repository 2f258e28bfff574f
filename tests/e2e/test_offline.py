"""`octavo-offline` with a real engine."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest

import successor_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return successor_model.write(tmp_path_factory.mktemp("model") / "tiny")


def arguments_of(model: Path, *arguments: str) -> list[str]:
    command = [str(Path(sys.executable).parent / "octavo-offline"), str(model), "--device", "cpu"]
    return [*command, "--max-model-len", "256", "--num-blocks-override", "64", *arguments]


def offline(model: Path, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = arguments_of(model, *arguments)
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=120, check=False)


def write_batch(path: Path, count: int) -> Path:
    """Write requests of rising length, named by their number."""
    lines = []
    for number in range(count):
        body = {"prompt": "a", "max_tokens": 4 * number + 4, "temperature": 0}
        lines.append({"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


class Terminal:
    """A program on a terminal of its own, and all that it shows."""

    def __init__(self, command: list[str]) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execve(command[0], command, {**os.environ, "TERM": "dumb"})
        self.shown = ""

    def wait_for(self, text: str) -> str:
        """Return what is shown up to `text`, and begin anew after it."""
        while text not in self.shown:
            assert select.select([self._fd], [], [], 120)[0], f"no {text!r} in {self.shown!r}"
            self.shown += os.read(self._fd, 4096).decode(errors="replace").replace("\r", "")
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def end(self) -> int:
        """Return the exit status, once there is one."""
        try:
            while os.read(self._fd, 4096):
                pass
        except OSError:
            pass  # the other end has closed the terminal
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def terminal(model: Path) -> Generator[Terminal]:
    # Answers have room for far more tokens than are sampled before they are stopped.
    shown = Terminal([*arguments_of(model)[:4], "--max-model-len", "4096", "--chat", "--max-tokens", "4000"])
    yield shown
    shown.close()


def test_prompts(model):
    done = offline(model, "--prompt", "q", "--prompt", "a", "--max-tokens", "9", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "==> prompt 1, answer 1 <==\n\N{HOT PEPPER}é语\n\n==> prompt 2, answer 1 <==\nbcSTOPzzz\n"
    )


@pytest.mark.slow
def test_batch(model):
    chat = {"messages": [{"role": "user", "content": "a"}], "temperature": 0, "stop": "STOP"}
    text = {"prompt": ["q", "e"], "temperature": 0, "max_tokens": 4}
    long = {"prompt": "a" * 300}
    requests = [
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "text", "method": "POST", "url": "/v1/completions", "body": text},
        {"custom_id": "long", "method": "POST", "url": "/v1/completions", "body": long},
    ]
    given = "".join(json.dumps(request) + "\n" for request in requests)
    done = offline(model, "--input", "-", "--served-model-name", "tiny", "--strict", given=given)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1] == "octavo-offline: 2 answered, 1 failed"
    answers = {answer["custom_id"]: answer for answer in map(json.loads, done.stdout.splitlines())}
    chat_body = answers["chat"]["response"]["body"]
    assert chat_body["choices"][0]["message"]["content"] == "bc"
    assert chat_body["choices"][0]["stop_reason"] == "STOP"
    assert chat_body["model"] == "tiny"
    text_body = answers["text"]["response"]["body"]
    assert [choice["text"] for choice in text_body["choices"]] == ["\N{HOT PEPPER}", ""]
    assert text_body["usage"]["completion_tokens"] == 5
    assert "octavo-offline: line 3: " in done.stderr
    refused = answers["long"]["response"]
    assert refused["status_code"] == 400
    said = refused["body"]["error"]["message"]
    assert "maximum context length is 256 tokens. However, your prompt is too long" in said


@pytest.mark.slow
def test_an_error_is_one_line(model):
    done = offline(model, "--prompt", "a" * 300)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(
        "octavo-offline: This model's maximum context length is 256 tokens. However,"
    )
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_conversation_on_a_terminal(terminal):
    terminal.wait_for("> ")
    terminal.type("q\n")
    assert "\N{HOT PEPPER}é语\n" in terminal.wait_for("> ")
    terminal.type("a\n")
    terminal.wait_for("bcSTOPzzzzzz")  # an answer without end, shown as it comes
    terminal.type("\x03")
    terminal.wait_for("stopped\n")
    terminal.wait_for("> ")
    terminal.type("e\n")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.end() == 0


@pytest.mark.slow
def test_a_conversation_of_lines(model):
    done = offline(model, "--chat", "--max-tokens", "6", "--temperature", "0", given="q\na\n")
    assert (done.returncode, done.stdout) == (0, "\N{HOT PEPPER}é\nbcSTOP\n")
    assert "stopped at --max-tokens 6" in done.stderr


@pytest.mark.slow
def test_a_prompt_from_standard_input(model):
    done = offline(model, "--prompt", "-", "--temperature", "0", given="x\nq\n")
    assert done.stdout == "\N{HOT PEPPER}é语\n"


@pytest.mark.slow
def test_without_a_seed_answers_differ(model):
    def sample(*more: str) -> str:
        given = "--prompt", "a", "--temperature", "2", "--max-tokens", "40", "--ignore-eos"
        done = offline(model, *given, *more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert sample() != sample()
    assert sample("--seed", "0") == sample("--seed", "0")


@pytest.mark.slow
def test_no_space_for_text_is_one_line(model):
    with Path("/dev/full").open("wb") as full:
        command = arguments_of(model, "--prompt", "a", "--max-tokens", "5")
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "octavo-offline: standard output: No space left on device"
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.slow
def test_no_space_for_a_batch_is_one_line(model, tmp_path):
    given = str(write_batch(tmp_path / "in.jsonl", 6))
    done = offline(model, "--input", given, "--output", "/dev/full")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "octavo-offline: /dev/full: No space left on device; 0 answers were written before"
    )
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_closed_pipe_is_one_line(model, tmp_path):
    command = arguments_of(model, "--input", str(write_batch(tmp_path / "in.jsonl", 6)))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        shown = process.stderr.read()
    assert process.returncode == 2
    assert shown.splitlines()[-1].startswith("octavo-offline: standard output: Broken pipe; 0 answers")
    assert "Traceback" not in shown and "Exception" not in shown


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_a_batch_that_was_stopped_goes_on(model, tmp_path, signal_number):
    source, target = write_batch(tmp_path / "in.jsonl", 60), tmp_path / "out.jsonl"
    command = arguments_of(model, "--input", str(source), "--output", str(target), "--max-num-seqs", "2")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while process.poll() is None and (not target.exists() or target.read_bytes().count(b"\n") < 3):
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
        process.send_signal(signal_number)
        shown = process.stderr.read()
    assert process.returncode == (130 if signal_number == signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in shown
    written = target.read_bytes()
    assert 3 <= written.count(b"\n") < 60
    if signal_number == signal.SIGINT:
        assert written.endswith(b"\n")
        assert "not run; --resume goes on from here" in shown
    target.write_bytes(written + written[:50])  # as when the machine stopped within a line
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in target.read_bytes().splitlines()]
    assert sorted(int(answer["custom_id"]) for answer in answers) == list(range(60))
    for answer in answers:
        usage = answer["response"]["body"]["usage"]
        assert usage["completion_tokens"] == 4 * int(answer["custom_id"]) + 4
    assert target.read_bytes().startswith(written)
