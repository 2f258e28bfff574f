"""The command line of octavo-offline, without a model."""

import subprocess
import sys

import pytest


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-c", code, *arguments]
    return subprocess.run(run, capture_output=True, text=True, timeout=30, check=False)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("import sys; from octavo_offline.cli import main; sys.exit(main())", *arguments)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "give either prompts (--prompt TEXT) or a batch (--input FILE)"),
        (["--prompt", "a", "--input", "b"], "give either prompts"),
        (["--prompt", "a", "--system", "b"], "system needs --chat"),
        (["--prompt", "a", "--output", "b"], "output needs --input"),
        (["--input", "b", "--chat"], "chat needs --prompt"),
        (["--input", "b", "--temperature", "0"], "temperature is for --prompt"),
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
