"""The command line of octavo-offline, without a model."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stepping_engine import SteppingEngine

from enginecore import EngineConfig
from octavo_offline import cli


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-c", code, *arguments]
    return subprocess.run(run, capture_output=True, text=True, timeout=30, check=False)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("import sys; from octavo_offline.cli import main; sys.exit(main())", *arguments)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "give a prompt (--prompt TEXT), a conversation (--chat) or a batch (--input FILE)"),
        (["--prompt", "a", "--input", "b"], "give either prompts"),
        (["--prompt", "a", "--system", "b"], "system needs --chat"),
        (["--prompt", "a", "--output", "b"], "output needs --input"),
        (["--input", "b", "--chat"], "chat needs --prompt"),
        (["--input", "b", "--temperature", "0"], "temperature is for --prompt"),
        (["--input", "b", "--resume"], "resume needs --output FILE"),
        (["--input", "b", "--output", "-", "--overwrite"], "overwrite needs --output FILE"),
        (["--input", "b", "--output", "c", "--overwrite", "--resume"], "give either --resume or --overwrite"),
        (["--prompt", "a", "--strict"], "strict needs --input"),
        (["--chat", "--n", "2"], "n is for --prompt"),
        (["--prompt", "-", "--prompt", "-"], "--prompt - is given twice"),
        (["--prompt", "a", "--temperature", "-1"], "temperature must be finite and at least 0, got -1.0"),
        (["--prompt", "a", "--n", "x"], "n must be an integer, got 'x' (from --n)"),
        (["--prompt", "a", "--frob"], "unrecognized arguments: --frob"),
        (["--input", "no/such/file"], "no/such/file: No such file or directory"),
        (["one", "--prompt", "a", "--model", "two"], "the model is named twice: one and --model two"),
    ],
)
def test_wrong_usage_is_one_line(arguments, said):
    done = command(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"octavo-offline: {said}")
    assert done.stderr.count("\n") == 1


def test_input_and_output_must_differ(tmp_path):
    path = tmp_path / "batch.jsonl"
    path.write_text("{}")
    done = command("--input", str(path), "--output", str(path))
    assert (done.returncode, path.read_text()) == (2, "{}")
    assert "same file" in done.stderr


def batch(folder: Path, *custom_ids: str) -> str:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"custom_id": custom_id}) + "\n" for custom_id in custom_ids))
    return str(path)


def answers(folder: Path, *custom_ids: str) -> Path:
    response = {"status_code": 400, "request_id": "r", "body": {}}
    lines = [
        {"id": "i", "custom_id": custom_id, "response": response, "error": None} for custom_id in custom_ids
    ]
    path = folder / "out.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_custom_ids_that_are_there_twice_are_an_error_before_the_model_loads(tmp_path):
    done = command("no/such/model", "--input", batch(tmp_path, "a", "b", "a"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "lines 1 and 3 have the same custom_id 'a'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_answers_are_not_overwritten_unless_asked_to(tmp_path):
    out = answers(tmp_path, "a")
    before = out.read_text()
    done = command("no/such/model", "--input", batch(tmp_path, "a"), "--output", str(out))
    assert (done.returncode, out.read_text()) == (2, before)
    assert "--resume keeps them and answers what is left, --overwrite replaces them" in done.stderr


@pytest.mark.parametrize("flag", ["--resume", "--overwrite"])
def test_a_run_that_cannot_start_leaves_earlier_answers(tmp_path, flag):
    out = answers(tmp_path, "a")
    before = out.read_text()
    done = command("no/such/model", "--input", batch(tmp_path, "a", "b"), "--output", str(out), flag)
    assert (done.returncode, out.read_text()) == (2, before)
    assert "no/such/model" in done.stderr.splitlines()[-1]


def test_nothing_is_loaded_when_all_is_answered(tmp_path):
    out = answers(tmp_path, "a", "b")
    given = "no/such/model", "--input", batch(tmp_path, "a", "b"), "--output", str(out), "--resume"
    done = command(*given)
    assert (done.returncode, len(out.read_text().splitlines())) == (0, 2)
    assert "2 of 2 requests are answered" in done.stderr
    assert command(*given, "--strict").returncode == 1


def test_help_and_version_load_nothing_heavy():
    code = (
        "import sys; from octavo_offline.cli import main\n"
        "try: main()\n"
        "except SystemExit as exit: assert exit.code == 0\n"
        "heavy = ('torch', 'triton', 'transformers', 'tokenizers', 'rich', 'zmq')\n"
        "print('heavy:', [m for m in heavy if m in sys.modules])"
    )
    for flag, shown in (("--help", "--ignore-eos"), ("--version", "octavo-offline 0.1.0")):
        done = python(code, flag)
        assert shown in done.stdout
        assert done.stdout.endswith("heavy: []\n")


def test_text_is_sampled_anew_each_time_unless_a_seed_is_given(engine, monkeypatch, tmp_path):
    seeds: list[int] = []

    def load(_: Any, config: EngineConfig) -> SteppingEngine:
        seeds.append(config.seed)
        return engine

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["octavo-offline", *arguments])
        assert cli.main() == 0
        return seeds.pop()

    monkeypatch.setattr(cli, "_load", load)
    assert run("--prompt", "a") != run("--prompt", "a")
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))
    assert run("--chat") != 0
    assert run("--prompt", "a", "--seed", "0") == 0
    monkeypatch.setenv("OCTAVO_SEED", "5")
    assert run("--prompt", "a") == 5
    monkeypatch.delenv("OCTAVO_SEED")
    assert run("--input", batch(tmp_path, "a"), "--output", str(tmp_path / "out.jsonl")) == 0
